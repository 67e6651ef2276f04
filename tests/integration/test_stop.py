from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from testbed.kernel import Kernel, wait_until
from tests.support.roles import alive, await_end, children, family, find, listening, revive

HANG = 20.0


@pytest.fixture
def own(ranks: Kernel) -> Kernel:
    """The shared kernel with two living ranks, whatever the test before did to them."""
    revive(ranks)
    return ranks


# --- stop, and start again


def test_after_stop_only_controller_agent_and_template_stay_and_one_listener(own: Kernel) -> None:
    ranks, template = own.rank_pids(), find(own.pid, "template")
    own.ok("%distributed stop")
    assert not any(map(alive, ranks)) and children(template) == []
    controller, agent = find(own.pid, "controller"), find(own.pid, "agent")
    assert sorted(family(controller)) == sorted([controller, agent, template])
    assert len(listening([controller])) == 1 and listening([agent, template]) == []
    own.ok("%distributed start -n 2", HANG)
    assert find(own.pid, "template") == template


def test_stop_frees_ranks_that_refuse_to_go(own: Kernel) -> None:
    own.ok(
        "%%distributed\nimport atexit, signal, threading\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "atexit.register(threading.Event().wait)"
    )
    ranks = own.rank_pids()
    own.ok("%distributed stop", HANG)
    assert not any(map(alive, ranks))


def test_sockets_of_data_loader_workers_go_with_ranks_that_are_killed(own: Kernel) -> None:
    temporary = Path(os.environ["TMPDIR"])
    before = set(temporary.glob("pymp-*"))
    own.ok(
        "%%distributed\nimport torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "batches = iter(DataLoader(TensorDataset(torch.ones(100, 9)), num_workers=2))\nnext(batches)"
    )
    assert len(list(temporary.glob("nbdist-*/rank-*"))) == 2
    for pid in own.rank_pids():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not list(temporary.glob("nbdist-*/rank-*")), "the folders to go")
    assert set(temporary.glob("pymp-*")) == before


def test_what_ranks_registered_with_atexit_runs_at_stop(own: Kernel, tmp_path: Path) -> None:
    own.ok(
        f"%%distributed\nimport atexit, pathlib\natexit.register(pathlib.Path('{tmp_path}').joinpath(str(rank)).touch)"
    )
    own.ok("%distributed stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_session_as_a_context_manager_stops_its_ranks(own: Kernel) -> None:
    own.ok(
        "import nbdist\nwith nbdist.Session(2) as first:\n"
        "    printed = first.run('print(rank)')[1].stdout\n    pids = [info.pid for info in first.ranks]\n"
        "with nbdist.Session(1) as second:\n    again = second.run('print(rank)')[0].stdout",
        HANG,
    )
    assert own.value("(printed, again, first.closed, second.closed)") == ("1\n", "0\n", True, True)
    assert not any(map(alive, own.value("pids")))


def test_a_context_manager_whose_body_fails_stops_its_ranks(own: Kernel) -> None:
    code = "import nbdist\nwith nbdist.Session(1) as session:\n    raise LookupError"
    own.fails(code, "LookupError", HANG)
    assert own.value("session.closed")
    assert not any(map(alive, own.value("[info.pid for info in session.ranks]")))


# --- what ranks have started ends with them


LEAVES = """%%distributed -r 0
import multiprocessing, os, subprocess, sys, time

def leave():
    os.setsid()
    time.sleep(600)

kept = [multiprocessing.Process(target=leave, daemon=True), multiprocessing.Process(target=time.sleep, args=(600,))]
for process in kept:
    process.start()
pids = [process.pid for process in kept]
pids.append(subprocess.Popen(["setsid", "sleep", "600"]).pid)
pids.append(int(subprocess.run("setsid sleep 600 > /dev/null 2>&1 & echo $!", shell=True, capture_output=True).stdout))
from torch.utils.data import DataLoader
batches = iter(DataLoader(list(range(100)), num_workers=2))
next(batches)
pids += [worker.pid for worker in batches._workers]
while any(os.getsid(pid) == os.getsid(0) for pid in (pids[0], pids[2], pids[3])):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("way", ["%distributed stop", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_workers_and_daemons_of_a_rank_end_with_it(own: Kernel, way: str) -> None:
    own.ok(LEAVES)
    started = own.value("__import__('nbdist').get_session().pull('pids', ranks=0)")
    assert len(started) == 6 and all(map(alive, started))
    own.run(way if way.startswith("%") else f"%%distributed -r 0\n{way}", HANG)
    await_end(started)


def test_daemons_of_a_living_rank_live_on_when_another_rank_dies(own: Kernel) -> None:
    own.ok(LEAVES)
    started = own.value("__import__('nbdist').get_session().pull('pids', ranks=0)")
    own.fails("%%distributed -r 1\nimport os; os._exit(3)", "RankDied")
    own.ok("%%distributed -r 0\npass")
    assert all(map(alive, started))


# --- forks of the kernel


FORKS = {
    "multiprocessing": "import multiprocessing\n"
    "process = multiprocessing.get_context('fork').Process(target=print)\nprocess.start(); process.join()",
    "a child that leaves through atexit": "import atexit, os\npid = os.fork()\n"
    "if pid == 0:\n    (lambda leave: [atexit._run_exitfuncs(), leave(0)])(os._exit)\n"
    "assert os.waitpid(pid, 0)[1] == 0",
    "a child that closes the session": "import nbdist, os\npid = os.fork()\n"
    "if pid == 0:\n    nbdist.get_session().close()\n    os._exit(0)\n"
    "assert os.waitpid(pid, 0)[1] == 0",
}


@pytest.mark.parametrize("fork", FORKS)
def test_a_fork_of_the_kernel_does_not_end_the_session(own: Kernel, fork: str) -> None:
    own.ok("%%distributed\nkept = rank")
    own.ok(FORKS[fork])
    printed = own.ok("%%distributed\nprint('kept', kept)").stdout
    assert "[0] kept 0\n" in printed and "[1] kept 1\n" in printed


def test_signals_to_the_kernels_process_group_do_not_reach_the_session(own: Kernel) -> None:
    pids = [find(own.pid, role) for role in ("controller", "agent", "template")] + own.rank_pids()
    sessions = [os.getsid(pid) for pid in pids]
    assert len(set(sessions)) == len(pids) and os.getsid(own.pid) not in sessions


def test_a_cell_whose_session_is_stopped_meanwhile_does_not_promise_variables(notebook: Kernel, tmp_path: Path) -> None:
    begun = str(tmp_path / "begun")
    code = f"import pathlib, time\npathlib.Path({begun!r} + str(rank)).touch()\nwhile True: time.sleep(0.01)"
    outcome = notebook.ok(
        "import nbdist, pathlib, threading, time\n"
        "session = nbdist.Session(2)\n"
        "def run():\n"
        f"    try: session.run({code!r})\n"
        "    except KeyboardInterrupt as error: print(error)\n"
        "thread = threading.Thread(target=run); thread.start()\n"
        f"while not all(pathlib.Path({begun!r} + str(rank)).exists() for rank in (0, 1)): time.sleep(0.01)\n"
        "session.close(grace=30); thread.join()"
    )
    assert outcome.stdout == "ranks 0-1 interrupted; their session was stopped\n"
