from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # as the agent sets it
HERE = str(Path(__file__).resolve().parents[2])
PROGRAM = """
import os, socket, sys, threading
from nbdist.agent.forks.forking import Template
from nbdist.wire.processes.template_messages import Fork, decode_report, encode
agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
template = Template(own)
stop = threading.Event()
if sys.argv[1] == "threaded":
    threading.Thread(target=stop.wait).start()
agent.send(encode(Fork(7)))
template.handle_request()
print(decode_report(agent.recv(4096)))
stop.set()
"""


def test_a_template_that_has_become_two_threads_forks_no_rank_and_says_so() -> None:
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": HERE}
    command = [sys.executable, "-c", PROGRAM, "threaded"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "ForkFailed" in done.stdout and "the template has 2 threads" in done.stdout


SERVE = """
import socket, sys
from nbdist.agent.forks.forking import Template
Template(socket.socket(fileno=int(sys.argv[1]))).serve("")
"""


def test_a_template_ends_when_its_agent_does() -> None:
    agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": HERE}
    command = [sys.executable, "-c", SERVE, str(own.fileno())]
    with subprocess.Popen(command, env=environment, pass_fds=[own.fileno()]) as template:
        own.close()
        assert agent.recv(4096)
        agent.close()
        assert template.wait(60) == 0
