"""Entry point of the agent: its template starts importing torch before the agent imports anything of its own."""

from __future__ import annotations

import os
import signal
import sys

from nbdist.agent.forks.warm_template import WarmTemplate
from nbdist.base import end_signals
from nbdist.base.processes import adopt_orphans, allow_many_files


def main() -> None:
    """Run this node's agent. Arguments: "patient" or "urgent", and the controller's process id."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_signals.ignore()  # until it can tell the controller
    adopt_orphans()
    allow_many_files()
    template = WarmTemplate(dict(os.environ), patient=sys.argv[1] == "patient")

    from nbdist.agent import agent

    sys.exit(agent.run(template, int(sys.argv[2])))
