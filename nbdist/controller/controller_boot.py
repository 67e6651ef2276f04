"""Entry point of the controller: starts its agent before importing anything the controller itself needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from nbdist.base import end_signals
from nbdist.base.processes import adopt_orphans, allow_many_files, python_command


def main() -> None:
    """Run a controller, whose argument is "patient" or "urgent"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_signals.ignore()  # until it can tell the notebook
    adopt_orphans()
    allow_many_files()
    agent = subprocess.Popen(
        python_command("nbdist.agent.agent_boot", sys.argv[1], str(os.getpid())), stdin=subprocess.PIPE
    )

    from nbdist.controller import controller

    controller.run(agent)
