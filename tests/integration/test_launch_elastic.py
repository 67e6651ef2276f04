"""notebook_launcher with restarts, and what its rendezvous arguments mean on one node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.kernel import Kernel, lines_by_rank, wait_until
from tests.support.roles import children, find

pytestmark = pytest.mark.torch_private  # torch's elastic agent is young

SETUP = """
import os, time
from nbdist import notebook_launcher

def fail_until(attempt):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    now = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"attempt {now} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}")
    if dist.get_rank() == 1 and int(now) < attempt:
        raise ValueError(f"boom {now}")
    dist.barrier()
    dist.destroy_process_group()
    return int(os.environ["RANK"]), int(now)

def die_once():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
        os._exit(3)

def wait():
    print("at it")
    time.sleep(100)

def where():
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"]
"""


@pytest.fixture
def kernel(notebook: Kernel) -> Iterator[Kernel]:
    """A kernel that has the launcher. Whatever a test launches has no rank and no store when it ends."""
    notebook.ok(SETUP)
    yield notebook
    template = find(notebook.pid, "template")
    wait_until(lambda: not template or not children(template), "an end of what was launched")


# --- restarts


def test_ranks_start_again_until_the_function_succeeds(kernel: Kernel) -> None:
    outcome = kernel.ok("notebook_launcher(fail_until, (2,), 2, max_restarts=3)")
    assert outcome.plain == ["[(0, 2), (1, 2)]"]
    said = [line for line in outcome.stdout.splitlines() if "start again" in line]
    assert said == [
        "nbdist: rank 1 raised ValueError: boom 0; all ranks start again (1 of 3)",
        "nbdist: rank 1 raised ValueError: boom 1; all ranks start again (2 of 3)",
    ]
    lines = "".join(line for line in outcome.stdout.splitlines(keepends=True) if line.startswith("["))
    attempts = [f"attempt {attempt} of 3" for attempt in range(3)]
    assert lines_by_rank(lines) == {0: attempts, 1: attempts}


def test_when_restarts_are_used_up_the_last_failure_is_raised(kernel: Kernel) -> None:
    outcome = kernel.fails("notebook_launcher(fail_until, (5,), 2, max_restarts=1)", "LaunchError")
    assert outcome.evalue == "rank 1 raised ValueError: boom 1"
    assert outcome.stdout.count("all ranks start again") == 1


def test_a_death_is_a_reason_to_start_again(kernel: Kernel) -> None:
    outcome = kernel.ok("notebook_launcher(die_once, (), 2, max_restarts=1)")
    assert "rank 0 died: exit code 3" in outcome.stdout
    assert outcome.plain == ["[None, None]"]


def test_without_restarts_left_a_failure_is_what_it_is_in_any_launch(kernel: Kernel) -> None:
    outcome = kernel.fails("notebook_launcher(fail_until, (1,), 2, rdzv_backend='c10d')", "LaunchError")
    assert outcome.evalue == "rank 1 raised ValueError: boom 0"
    assert "start again" not in outcome.stdout


def test_an_interrupt_ends_the_launch_whatever_restarts_are_left(kernel: Kernel) -> None:
    cell = kernel.start("notebook_launcher(wait, (), 2, max_restarts=3)")
    cell.wait_for("at it")
    kernel.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "KeyboardInterrupt"
    assert "start again" not in outcome.stdout


def test_a_timeout_ends_the_launch_whatever_restarts_are_left(kernel: Kernel) -> None:
    outcome = kernel.fails("notebook_launcher(wait, (), 2, max_restarts=3, timeout=1)", "RankTimeout")
    assert "start again" not in outcome.stdout


def test_the_notebook_is_afterwards_as_it_was_before(kernel: Kernel) -> None:
    kernel.ok("notebook_launcher(fail_until, (1,), 2, max_restarts=1)")  # torch is loaded, the client's thread is there
    kernel.ok(
        "import logging, psutil, signal, threading\n"
        "def state():\n"
        "    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]\n"
        "    logger = logging.getLogger('torch.distributed.elastic')\n"
        "    listens = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]\n"
        "    logs = logger.handlers[:], logger.propagate\n"
        "    return handlers, set(threading.enumerate()), dict(os.environ), logs, listens\n"
        "before = state()"
    )
    kernel.ok("notebook_launcher(fail_until, (1,), 2, max_restarts=1)")
    assert kernel.value("state() == before")


# --- the rendezvous of one node


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_ranks_of_one_node_meet_on_loopback_at_the_port_that_was_named(kernel: Kernel, port: int, backend: str) -> None:
    options = f"rdzv_backend={backend!r}, max_restarts=1, rdzv_id='mine'"
    kernel.ok(f"result = notebook_launcher(where, (), 2, use_port={port}, {options})")
    assert kernel.value("result") == [("127.0.0.1", str(port), "mine")] * 2
    kernel.ok(f"result = notebook_launcher(where, (), 2, rdzv_endpoint='localhost:{port}', {options})")
    assert kernel.value("result") == [("127.0.0.1", str(port), "mine")] * 2


def test_a_named_port_that_is_taken_is_an_error_that_names_its_owner(kernel: Kernel, port: int) -> None:
    kernel.ok(f"import socket; listener = socket.create_server(('127.0.0.1', {port}))")
    outcome = kernel.fails(f"notebook_launcher(where, (), 2, rdzv_backend='c10d', use_port={port})", "UsageError")
    assert f"port {port} is taken by process {kernel.pid}" in outcome.evalue
    kernel.ok("listener.close()")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("max_restarts=1, rdzv_conf={'timeout': 'soon'}", "timeout must be a number of seconds above 0, not 'soon'"),
        ("rdzv_backend='c10d', rdzv_conf={'join_timeout': 0}", "join_timeout must be a number of seconds above 0"),
        ("rdzv_backend='c10d', rdzv_conf={'store_type': 'file'}", "leave store_type out"),
        ("rdzv_endpoint='localhost:many'", "rdzv_endpoint='10.0.0.1:29500'"),
        ("num_nodes=2, use_port=0", "several nodes need the same port"),
    ],
)
def test_a_wrong_setting_is_named(kernel: Kernel, options: str, text: str) -> None:
    outcome = kernel.fails(f"notebook_launcher(where, (), 2, {options})", "UsageError")
    assert text in outcome.evalue
