from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, Outcome, both, wait_until

DATASET = """%%distributed
import time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.2)
        return torch.ones(2)
"""

# What main threads may be doing when the user interrupts. Each prints "go" first.
PYTHON = {
    "a_loop": "n = 0\nwhile True: n += 1",
    "sleep": "import time\ntime.sleep(60)",
    "await": "import asyncio\nawait asyncio.sleep(60)",
    "a_shell_command": "!sleep 60",
    "subprocess": "import subprocess\nsubprocess.run(['sleep', '60'])",
    "a_lock": "import threading\nlock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a_queue": "import queue\nqueue.Queue().get()",
    "joining_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
    "threading.enumerate()[-1].join()",
    "torch_calls": "import torch\nx = torch.rand(300, 300)\nwhile True: x = (x @ x).softmax(0)",
    "an_autograd_hook": "import torch, time\nx = torch.ones(3, requires_grad=True)\ny = x * 2\n"
    "y.register_hook(lambda grad: time.sleep(60))\ny.sum().backward()",
    "a_program_that_exits": "import sys, time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: sys.exit(1)",
    "a_finally_block": "import time\ntry: time.sleep(60)\nfinally: cleaned = True",
}


def interrupted(kernel: Kernel, code: str, text: str = "go", count: int = 2) -> Outcome:
    """Run a cell, interrupt the kernel once every rank has printed the text, and see the end."""
    cell = kernel.start(code)
    cell.wait_until(lambda seen: _printed_by_all(seen, text, count), f"{text!r} from {count} ranks")
    kernel.interrupt()
    return cell.finish()


def _printed_by_all(seen: Outcome, text: str, count: int) -> bool:
    return all(text in seen.lines.get(rank, []) for rank in range(count))


def _waits_for_other_threads(pid: int) -> bool:
    """Whether the main thread has been waiting in a futex, as it does in a gloo collective, at five looks in a row."""
    for _ in range(5):  # not only on its way through one
        if "futex" not in Path(f"/proc/{pid}/wchan").read_text():
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("what", PYTHON)
def test_an_interrupt_ends_the_cell_on_every_rank_in(what: str, ranks: Kernel) -> None:
    ranks.ok("%%distributed\nkept = ['state', rank]")
    outcome = interrupted(ranks, f"%%distributed\nprint('go')\n{PYTHON[what]}")
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    assert "ranks 0-1" in outcome.evalue
    assert ranks.ok("%%distributed\nprint(kept)").stdout.count("state") == 2


def test_an_interrupt_ends_a_loop_over_a_data_loader_and_its_workers(ranks: Kernel) -> None:
    ranks.ok(DATASET)
    code = "%%distributed\nfor batch in DataLoader(Slow(), batch_size=2, num_workers=2):\n    print('go')"
    assert interrupted(ranks, code).ename == "KeyboardInterrupt"
    ranks.ok("%%distributed\nimport multiprocessing\npass")
    outcome = ranks.ok("%%distributed\nprint(len(multiprocessing.active_children()))")
    assert outcome.lines == both("0")


PROGRAM = f"{sys.executable} -c 'import time; print(\"go\", flush=True); time.sleep(604)'"
# Ways to wait for a program that is no child of the rank itself, or in C.
PROGRAMS = {
    "a_pipe_of_a_shell_command": f"!{PROGRAM} | cat",
    "a_pipe_of_a_subprocess": f"import subprocess\nsubprocess.run({PROGRAM + ' | cat'!r}, shell=True)",
    "system": f"import os, time\nos.system({PROGRAM!r})\ntime.sleep(60)",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_an_interrupt_ends_the_programs_of_the_cell_in(what: str, ranks: Kernel) -> None:
    outcome = interrupted(ranks, f"%%distributed\n{PROGRAMS[what]}")
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    wait_until(lambda: not _programs_below(ranks), lambda: str(_programs_below(ranks)))


def _programs_below(kernel: Kernel) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(kernel.pid).children(recursive=True):
        try:
            if "sleep(604)" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def test_an_interrupt_leaves_programs_of_earlier_cells_and_workers_of_this_one(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nimport subprocess\nserver = subprocess.Popen(['sleep', '600'])")
    code = (
        "%%distributed\nimport multiprocessing, time\npool = multiprocessing.get_context('spawn').Pool(1)\n"
        "pool.map(abs, [1])\nprint('go')\ntime.sleep(60)"
    )
    assert interrupted(ranks, code).ename == "KeyboardInterrupt"
    outcome = ranks.ok("%%distributed\nprint(server.poll(), pool.map(abs, [-2]))")
    assert outcome.lines == both("None [2]")
    ranks.ok("%%distributed\nserver.kill()\nserver.wait()\npool.terminate()\npool.join()")


@pytest.mark.torch_private
def test_an_interrupt_leaves_the_compiler_of_torch_that_is_starting(ranks: Kernel) -> None:
    """It ignores interrupts from the moment when it has imported torch."""
    code = (
        "%%distributed\nimport time\nfrom torch._inductor import config\n"
        "from torch._inductor.async_compile import AsyncCompile\n"
        "config.compile_threads = 2\ncompiler = AsyncCompile.process_pool()\nprint('go')\ntime.sleep(60)"
    )
    assert interrupted(ranks, code).ename == "KeyboardInterrupt"
    assert ranks.ok("%%distributed\nprint(compiler.submit(abs, -1).result())").lines == both("1")
    ranks.ok("%%distributed\ncompiler.shutdown()\nconfig.compile_threads = 1")


def test_an_interrupted_await_does_not_go_on_in_the_next_cell(ranks: Kernel) -> None:
    code = "%%distributed\nimport asyncio\nzombie = False\nprint('go')\nawait asyncio.sleep(0.3)\nzombie = True"
    assert interrupted(ranks, code).ename == "KeyboardInterrupt"
    assert ranks.ok("%%distributed\nawait asyncio.sleep(0.5)\nprint(zombie)").lines == both("False")


def test_an_interrupt_swallowed_by_a_finalizer_is_sent_again(ranks: Kernel) -> None:
    code = (
        "%%distributed\nimport time\nclass Slow:\n    def __del__(self):\n        print('go')\n        time.sleep(1)\n"
        "slow = Slow()\ndel slow\ntime.sleep(60)"
    )
    assert interrupted(ranks, code).ename == "KeyboardInterrupt"


def test_an_interrupt_that_user_code_swallows_once_is_sent_again(ranks: Kernel) -> None:
    code = "%%distributed\nimport time\ntry: print('go'); time.sleep(60)\nexcept BaseException: pass\ntime.sleep(60)"
    assert interrupted(ranks, code).ename == "KeyboardInterrupt"


# What a program does about an interrupt, which takes longer than any wait after which one is sent again.
SAVE = """%%distributed
import time
def save():
    for _ in range(35): time.sleep(0.1)
    print('saved')
def stay():
    print('go')
    time.sleep(60)
"""
CATCHES = {
    "an_except_clause": "try: stay()\nexcept KeyboardInterrupt: save()",
    "what_follows_one": "try: stay()\nexcept (ValueError, KeyboardInterrupt): pass\nsave()",
    "a_function": "def train():\n    try: stay()\n    except KeyboardInterrupt: save()\ntrain()",
}


@pytest.mark.parametrize("what", CATCHES)
def test_a_cell_that_catches_the_interrupt_takes_its_time_and_ends_well(what: str, ranks: Kernel) -> None:
    outcome = interrupted(ranks, SAVE + CATCHES[what])
    assert outcome.status == "ok", str(outcome)
    assert outcome.lines == {0: ["go", "saved"], 1: ["go", "saved"]}


def test_a_finally_clause_that_the_interrupt_has_begun_is_not_interrupted(ranks: Kernel) -> None:
    outcome = interrupted(ranks, SAVE + "try: stay()\nfinally: save()")
    assert outcome.ename == "KeyboardInterrupt" and outcome.lines == {0: ["go", "saved"], 1: ["go", "saved"]}


def test_a_second_interrupt_ends_what_the_first_has_begun(ranks: Kernel) -> None:
    code = SAVE + "try: stay()\nexcept KeyboardInterrupt:\n    print('saving')\n    time.sleep(60)"
    cell = ranks.start(code)
    for text in ("go", "saving"):
        cell.wait_for_ranks(2, text)
        ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"


def test_what_was_printed_before_the_interrupt_is_shown(ranks: Kernel) -> None:
    code = "%%distributed\nimport time\nprint('step', end=' ')\nprint('go')\ntime.sleep(60)"
    outcome = interrupted(ranks, code, "step go")
    assert outcome.lines == both("step go")


def test_the_lines_after_an_interrupted_shell_command_do_not_run(ranks: Kernel) -> None:
    code = "%%distributed\nprint('go')\nafter = False\n!sleep 60\nafter = True"
    assert interrupted(ranks, code).ename == "KeyboardInterrupt"
    assert ranks.ok("%%distributed\nprint(after)").lines == both("False")


def test_the_interrupted_line_is_shown(ranks: Kernel) -> None:
    outcome = interrupted(ranks, "%%distributed\nimport time\nprint('go')\ntime.sleep(60)")
    assert "time.sleep(60)" in outcome.traceback
    assert "interrupts.py" not in outcome.traceback


def test_an_interrupt_never_hits_the_next_cell_nor_a_moment_between_cells(ranks: Kernel) -> None:
    """Short cells in a row, interrupted at moments that wander through all of their phases."""
    ranks.ok(
        "import nbdist, threading, time\n"
        "session = nbdist.get_session()\n"
        "ends = {'interrupted': 0, 'finished': 0}\n"
        "for moment in range(200):\n"
        "    handle = session.run_in_background('import time\\nfor _ in range(3): time.sleep(0.001)', show=False)\n"
        "    threading.Timer(moment * 0.00005, handle.interrupt).start()\n"
        "    try:\n"
        "        handle.wait(20)\n"
        "        ends['finished'] += 1\n"
        "    except KeyboardInterrupt:\n"
        "        ends['interrupted'] += 1\n"
        "    assert session.run('x = 1; x')[1].result == '1'\n"
    )
    assert ranks.value("ends['interrupted']") > 0 and ranks.value("ends['finished']") > 0


# A rank interrupts the notebook with the last thing that it does, so that Ctrl-C comes just as all ranks have finished.
LOOP = """
import os, nbdist, signal
session = nbdist.get_session()
session.run(f"import os, signal\\nx = 1\\ndef press(): os.kill({os.getpid()}, signal.SIGINT)")
work = {
    "run": lambda: session.run("press()"),
    "call": lambda: session.call(os.kill, os.getpid(), signal.SIGINT),
    "pull": lambda: session.pull("press()"),
    "push": lambda: (session.run("import threading; threading.Timer(0.001, press).start()", 0), session.push({"x": 2})),
}[WHAT]
lost = 0
for trial in range(30):
    try:
        work()
        for repeat in range(100):
            session.run("x")
        lost += 1
    except KeyboardInterrupt:
        pass
    assert session.run("x")[1].result in ("1", "2")
"""


PRESS_WHEN_DONE = """
import nbdist, os, signal, threading, time
from tests.support.inside import traffic_of
os.environ["JPY_SESSION_NAME"] = "a notebook"
traffic = traffic_of(nbdist.get_session())
def press():
    while not traffic.running([0]): time.sleep(0.001)
    traffic.wait_free([0], 30)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
"""


@pytest.mark.parametrize("what", ["run", "call", "pull", "push"])
def test_one_interrupt_ends_a_loop_of_short_work_whenever_it_comes(what: str, ranks: Kernel) -> None:
    ranks.ok(LOOP.replace("WHAT", repr(what)))
    assert ranks.value("lost") == 0


def test_an_interrupt_while_the_page_catches_up_stops_run_all(ranks: Kernel) -> None:
    # Where a server stands between kernel and page, text is published at the pace that it lets through.
    ranks.ok(PRESS_WHEN_DONE)
    flood = ranks.start("%%distributed -r 0\nfor _ in range(60): print('y' * 100_000)")
    after = ranks.start("ran_on = True")
    assert flood.finish().ename == "KeyboardInterrupt"
    after.finish()
    ranks.ok("del os.environ['JPY_SESSION_NAME']")
    ranks.fails("ran_on", "NameError")


def test_a_rank_that_has_finished_is_not_hit(ranks: Kernel) -> None:
    code = "%%distributed\nimport time\nfinished = True\nprint('go')\nif rank == 1: time.sleep(60)"
    outcome = interrupted(ranks, code)
    assert outcome.evalue == "rank 1 interrupted; its variables are kept"
    assert "rank 0: finished" in outcome.traceback


def test_a_third_interrupt_gives_the_notebook_back_from_a_call_that_nothing_ends(own_ranks: Kernel) -> None:
    kernel = own_ranks
    cell = kernel.start(
        "%%distributed\nimport hashlib\nprint('go')\nif rank == 0: hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    )
    cell.wait_until(lambda seen: _printed_by_all(seen, "go", 2))
    kernel.interrupt()
    cell.wait_for("Interrupt again")
    kernel.interrupt()
    kernel.interrupt()
    outcome = cell.finish()
    assert outcome.ename == "RankTimeout", str(outcome)
    assert "pbkdf2_hmac" in outcome.traceback
    assert "%distributed restart" in outcome.traceback
    refused = kernel.fails("%%distributed -r 0\n1", "SessionBusy")
    assert "line 4" in refused.evalue and "pbkdf2_hmac" in refused.evalue and "%distributed restart" in refused.evalue
    assert kernel.ok("%%distributed -r 1\nprint('free')").stdout == "[1] free\n"
    kernel.ok("%distributed restart")
    kernel.ok("%%distributed\nprint('fresh')")


def test_a_long_call_into_c_is_named_with_its_line_and_waited_for(ranks: Kernel) -> None:
    code = (
        "%%distributed -r 0\nimport hashlib, time\nbegan = time.perf_counter()\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 100_000)\n"
        "rounds = int(3 * 100_000 / (time.perf_counter() - began))  # three seconds' worth\nprint('go')\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', rounds)\nafter = True"
    )
    ranks.ok("%%distributed -r 0\nafter = False")
    outcome = interrupted(ranks, code, count=1)
    assert "rank 0 will stop when this call ends; rank 0 is in cell" in outcome.stderr
    assert "line 7: hashlib.pbkdf2_hmac" in outcome.stderr
    assert outcome.ename == "KeyboardInterrupt", str(outcome)
    assert ranks.ok("%%distributed -r 0\nprint(after)").stdout == "[0] False\n"


def test_a_background_cell_is_interrupted_through_its_handle(ranks: Kernel) -> None:
    ranks.ok("%%distributed --background\nimport time\nprint('go')\ntime.sleep(60)")
    ranks.ok("handle = _")
    ranks.ok("handle.interrupt()")
    outcome = ranks.run("handle.wait(20)")
    assert outcome.ename == "KeyboardInterrupt"
    ranks.ok("%%distributed\nx = 1")


def test_the_interrupt_verb_stops_a_background_cell(ranks: Kernel) -> None:
    ranks.ok("%%distributed --background -r 1\nimport time\ntime.sleep(60)")
    ranks.ok("handle = _")
    ranks.ok("%distributed interrupt -r 1")
    assert ranks.run("handle.wait(20)").ename == "KeyboardInterrupt"


def test_an_interrupt_during_a_start_leaves_no_ranks(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    cell = kernel.start("%distributed start -n 2")
    cell.wait_for("importing")
    kernel.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    kernel.fails("%%distributed\n1", "SessionClosed")
    kernel.ok("%distributed start -n 2")
    kernel.ok("%%distributed\n1")


# Presses Ctrl-C when a module is imported: that of the GPUs' management library is, as a start begins.
PRESS_AT_IMPORT = """
import os, signal, sys
class Press:
    def find_spec(self, name, *_):
        if name == "pynvml":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
"""


def test_an_interrupt_before_a_start_has_begun_is_one_line() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext nbdist")
        kernel.ok(PRESS_AT_IMPORT)
        outcome = kernel.fails("%distributed start -n 1", "KeyboardInterrupt")
        assert (
            outcome.traceback == "KeyboardInterrupt: `%distributed start` was interrupted before its end: type it again"
        )
        kernel.ok("%distributed start -n 1")


def test_an_interrupt_in_the_notebook_itself_does_not_reach_the_ranks(ranks: Kernel) -> None:
    ranks.ok("%%distributed --background\nimport time\nfor _ in range(20): time.sleep(0.05)\nprint('undisturbed')")
    ranks.ok("handle = _")
    cell = ranks.start("print('here')\nimport time\ntime.sleep(60)")
    cell.wait_for("here")
    ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    ranks.ok("handle.wait(20)")
    wait_until(lambda: ranks.value("'undisturbed' in handle.output[1].stdout"), "the ranks' last line")
