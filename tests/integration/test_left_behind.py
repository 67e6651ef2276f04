"""Whatever a cell leaves behind on a rank, the rank lives, the cell ends, and the next cell works and is seen."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from testbed.kernel import Kernel, both, lines_by_rank, wait_until
from tests.support.roles import children

EXIT_CODE = "child.join() or child.exitcode"
RESTORED = "it is restored for the next cell"


@pytest.fixture(autouse=True)
def next_cell_works(ranks: Kernel) -> Iterator[None]:
    """The same ranks, with their variables, run the next cell and show its output."""
    ranks.ok("%%distributed\nimport os, signal, sys, threading, time\nkept = rank + 10")
    before = ranks.rank_pids()
    yield
    outcome = ranks.ok("%%distributed\nprint('out', kept)\nprint('err', kept, file=sys.stderr)")
    assert outcome.lines == {rank: [f"out {rank + 10}"] for rank in (0, 1)}
    assert lines_by_rank(outcome.stderr) == {rank: [f"err {rank + 10}"] for rank in (0, 1)}
    assert ranks.rank_pids() == before
    cell = ranks.start("%%distributed\nprint('go')\nwhile True: time.sleep(0.01)")
    cell.wait_until(lambda seen: len(seen.lines) == 2, "both ranks")
    ranks.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"


# --- text and names that are not Unicode


@pytest.mark.parametrize("error", ["ValueError('caf\\udce9')", "type('Caf\\udce9', (Exception,), {})()"])
def test_an_exception_that_is_not_unicode_is_shown_escaped(ranks: Kernel, error: str) -> None:
    outcome = ranks.fails(f"%%distributed\nraise {error}", "RankError")
    assert "\\udce9" in outcome.traceback


def test_a_name_that_is_not_unicode_is_a_name_like_others(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nglobals()['caf\\udce9'] = 1")
    assert ranks.ok("%%distributed\nprint(globals().pop('caf\\udce9'))").lines == both("1")


def test_a_result_and_a_display_that_are_not_unicode_are_shown_escaped(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\ndisplay({'text/plain': 'caf\\udce9'}, raw=True, metadata={'b\\udce9': '\\udce9'})"
    )
    assert "caf\\udce9" in " ".join(outcome.plain)


def test_code_that_is_not_unicode_runs_with_its_text_escaped(ranks: Kernel) -> None:
    ranks.ok("import nbdist; nbdist.get_session().run(f\"text = 'caf{chr(0xDCE9)}'\")")
    assert ranks.ok("%%distributed\nprint(ascii(text))").lines == both("'caf\\udce9'")


@pytest.mark.parametrize("key", ["1", "None", "('a', 1)"])
def test_a_global_that_is_no_name_stays(ranks: Kernel, key: str) -> None:
    ranks.ok(f"%%distributed\nglobals()[{key}] = 2")
    assert ranks.ok(f"%%distributed\nprint(globals().pop({key}))").lines == both("2")


# --- displays that no message can hold


@pytest.mark.parametrize(
    "arguments",
    [
        "metadata={1: 2}",
        "metadata={None: {(1, 2): 3}}",
        "metadata={'huge': 2**70}",
        "metadata={'object': object()}",
        "display_id=5",
    ],
)
def test_a_display_with_odd_metadata_is_shown(ranks: Kernel, arguments: str) -> None:
    outcome = ranks.ok(f"%%distributed\ndisplay({{'text/plain': 'shown'}}, raw=True, {arguments})")
    assert "shown" in " ".join(outcome.plain)


def test_a_display_whose_type_is_no_text_is_shown(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\ndisplay({'text/plain': 'shown', 5: {1: 2}}, raw=True)")
    assert "shown" in " ".join(outcome.plain)


# --- signals


def test_a_timeout_that_was_not_cancelled_is_cancelled_with_its_cell(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\ndef expire(*_): raise TimeoutError('mine')\n"
        "signal.signal(signal.SIGALRM, expire)\nsignal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)"
    )
    assert "this cell left an alarm pending" in outcome.stderr
    assert ranks.ok("%%distributed\nprint(signal.getitimer(signal.ITIMER_REAL))").lines == both("(0.0, 0.0)")


def test_an_alarm_without_a_handler_does_not_kill_the_rank_after_its_cell(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nsignal.signal(signal.SIGALRM, signal.SIG_DFL); signal.alarm(1)")
    assert ranks.ok("%%distributed\nprint(signal.alarm(0))").lines == both("0")


@pytest.mark.parametrize("error", ["ValueError('mine')", "KeyboardInterrupt", "SystemExit(3)"])
def test_a_signal_handler_that_raises_between_cells_is_shown(ranks: Kernel, error: str) -> None:
    cell = ranks.start(f"%%distributed -r 1\ndef complain(*_): raise {error}\nsignal.signal(signal.SIGUSR1, complain)")
    assert cell.finish().status == "ok"
    os.kill(ranks.rank_pids()[1], signal.SIGUSR1)
    cell.wait_late(f"raise {error}")


@pytest.mark.parametrize(
    "code",
    [
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])",
    ],
)
def test_what_a_cell_does_to_sigint_ends_with_it(ranks: Kernel, code: str) -> None:
    ranks.ok(f"%%distributed\n{code}")


# --- descriptors and streams


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("file = open(os.devnull, 'w'); os.dup2(file.fileno(), 1); file.close()", "file descriptor 1 (stdout)"),
        ("file = open(os.devnull, 'w'); os.dup2(file.fileno(), 2); file.close()", "file descriptor 2 (stderr)"),
        ("os.close(1)", "file descriptor 1 (stdout)"),
        ("os.close(1); os.close(2)", "file descriptor 2 (stderr)"),
        ("sys.stdout.close()", "sys.stdout"),
        ("sys.stderr.close()", "sys.stderr"),
        ("sys.stdout = open(os.devnull, 'w'); sys.stdout.close()", "sys.stdout"),
        ("sys.stdout = None", "sys.stdout"),
        ("del sys.stderr", "sys.stderr"),
    ],
)
def test_a_stream_that_a_cell_has_closed_or_redirected_is_back_for_the_next(
    ranks: Kernel, code: str, what: str
) -> None:
    outcome = ranks.ok(f"%%distributed\n{code}")
    assert f"this cell left {what} closed or redirected" in outcome.stderr and RESTORED in outcome.stderr


def test_what_is_printed_while_descriptor_1_is_redirected_goes_where_it_leads(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nimport tempfile\nwith tempfile.TemporaryFile() as file:\n"
        "    own = os.dup(1); os.dup2(file.fileno(), 1)\n    print('to the file')\n"
        "    os.dup2(own, 1); os.close(own)\n    file.seek(0); text = file.read()\nprint('read', text.decode().strip())"
    )
    assert outcome.lines == both("read to the file")
    assert RESTORED not in outcome.stderr


def test_a_display_while_descriptor_1_is_redirected_is_shown_in_its_place(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nown = os.dup(1); null = os.open(os.devnull, os.O_WRONLY); os.dup2(null, 1); os.close(null)\n"
        "display({'text/plain': 'shown'}, raw=True)\nos.dup2(own, 1); os.close(own)\nprint('after')"
    )
    assert "shown" in " ".join(outcome.plain) and outcome.lines == both("after")


def test_another_stream_in_place_of_stdout_stays(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nimport io\nown, sys.stdout = sys.stdout, io.StringIO()")
    ranks.ok("%%distributed\nprint('into the buffer')")
    outcome = ranks.ok("%%distributed\nbuffer, sys.stdout = sys.stdout, own\nprint(buffer.getvalue().strip())")
    assert outcome.lines == both("into the buffer")


def test_a_pipe_that_was_made_non_blocking_takes_all_that_is_printed(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nos.set_blocking(1, False)\nfor i in range(300): print(i, 'x' * 5000)")
    assert {rank: len(lines) for rank, lines in outcome.lines.items()} == {0: 300, 1: 300}
    assert ranks.ok("%%distributed\nprint(os.get_blocking(1))").lines == both("True")


def test_a_thread_that_waits_in_a_stream_of_c_holds_no_cell_up(ranks: Kernel) -> None:
    ranks.ok(
        "%%distributed\nimport ctypes\nlibc = ctypes.CDLL(None)\nlibc.fdopen.restype = ctypes.c_void_p\n"
        "read, write = os.pipe(); stream = ctypes.c_void_p(libc.fdopen(read, b'r'))\n"
        "thread = threading.Thread(target=libc.fgetc, args=(stream,)); thread.start()\n"
        "while 'pipe' not in open(f'/proc/self/task/{thread.native_id}/wchan').read(): pass"
    )
    ranks.ok("%%distributed\nos.write(write, b'x'); thread.join(); libc.fclose(stream); os.close(write)")


def test_a_thread_that_holds_the_lock_of_c_stdout_holds_no_cell_up(ranks: Kernel) -> None:
    ranks.ok(
        "%%distributed\nimport ctypes\nlibc = ctypes.CDLL(None)\nstdout = ctypes.c_void_p.in_dll(libc, 'stdout')\n"
        "held, release = threading.Event(), threading.Event()\n"
        "def hold():\n    libc.flockfile(stdout); held.set(); release.wait(); libc.funlockfile(stdout)\n"
        "thread = threading.Thread(target=hold); thread.start(); held.wait()"
    )
    ranks.ok("%%distributed\nrelease.set(); thread.join()")


# --- processes


def test_a_forked_child_that_comes_back_ends_as_after_a_script(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nchild = os.fork()\nif child == 0: print('in the child')\n"
        "else: print('exit code', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert outcome.lines == both("in the child", "exit code 0")


def test_a_forked_child_that_raises_shows_its_traceback_and_ends(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed\nchild = os.fork()\nif child == 0: raise ValueError('in the child')\n"
        "print('exit code', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert outcome.lines == both("exit code 1") and "in the child" in outcome.stderr


@pytest.mark.parametrize("way", ["session.call(fork)", "session.pull('fork()')"])
def test_a_child_that_comes_back_from_a_call_or_a_value_ends(ranks: Kernel, way: str) -> None:
    ranks.ok("%%distributed\ndef fork():\n    import os\n    return os.fork() and 1")
    ranks.ok("import nbdist; session = nbdist.get_session()\ndef fork():\n    import os\n    return os.fork() and 1")
    assert ranks.value(way) == [1, 1]
    wait_until(lambda: not any(children(pid) for pid in ranks.rank_pids()), "the children to end")


def test_orphans_that_a_rank_has_adopted_are_reaped_when_they_have_ended(ranks: Kernel) -> None:
    def adopted() -> set[int]:
        ranks.ok("%%distributed\npass")
        return {child.pid for rank in ranks.rank_pids() for child in psutil.Process(rank).children()}

    before = adopted()
    ranks.ok("%%distributed\nfor _ in range(5): os.system('(exit 3 &)')")
    wait_until(lambda: adopted() <= before, "the orphans to be reaped")


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("child = subprocess.Popen('exit 3', shell=True); pid = child.pid", "child.wait()"),
        ("child = multiprocessing.Process(target=os._exit, args=(3,)); child.start(); pid = child.pid", EXIT_CODE),
        ("pid = os.fork()\nif pid == 0: os._exit(3)", "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"),
    ],
    ids=["subprocess", "multiprocessing", "fork"],
)
def test_the_exit_codes_of_a_rank_s_own_children_are_left_to_who_started_them(
    ranks: Kernel, begin: str, end: str
) -> None:
    ranks.ok(
        f"%%distributed\nimport multiprocessing, subprocess\n{begin}\nos.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)"
    )
    for _ in range(3):
        ranks.ok("%%distributed\npass")
    assert ranks.ok(f"%%distributed\nprint({end})").lines == both("3")


# --- threads, event loops and folders


@pytest.mark.parametrize("code", ["asyncio.get_event_loop().close()", "asyncio.run(asyncio.sleep(0))"])
def test_a_cell_can_await_whatever_another_has_done_to_the_event_loop(ranks: Kernel, code: str) -> None:
    ranks.ok(f"%%distributed\nimport asyncio\n{code}")
    assert ranks.ok("%%distributed\nprint(await asyncio.sleep(0, 'awaited'))").lines == both("awaited")


def test_a_thread_that_raises_after_its_cell_is_shown_below_it(ranks: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = ranks.start(
        "%%distributed -r 1\ndef fail():\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.005)\n    raise ValueError('in a thread')\n"
        "threading.Thread(target=fail, daemon=True).start()"
    )
    assert cell.finish().status == "ok"
    go.touch()
    cell.wait_late("ValueError: in a thread")


def test_a_current_folder_that_was_removed_does_no_harm(ranks: Kernel) -> None:
    ranks.ok(
        "%%distributed\nimport tempfile\nbefore, gone = os.getcwd(), tempfile.mkdtemp()\nos.chdir(gone); os.rmdir(gone)"
    )
    ranks.ok("%%distributed\nos.chdir(before)")


# --- our own work around a cell


def test_a_failure_of_the_work_around_a_cell_is_its_error(ranks: Kernel) -> None:
    ranks.ok(
        "%%distributed\nimport torch.distributed.distributed_c10d as c10d\n"
        "class Broken:\n    asked = 0  # at the end of this cell, then by the next ones\n    def size(self): return 1\n"
        "    def rank(self):\n        Broken.asked += threading.current_thread() is threading.main_thread()\n"
        "        if Broken.asked in (2, 3): raise MemoryError('no room')\n        return -1\n"
        "c10d._world.pg_names[Broken()] = 'broken'"
    )
    for _ in range(2):
        outcome = ranks.fails("%%distributed\nran = True", "RankError")
        assert "no room" in outcome.traceback and "before its end" in outcome.traceback
    outcome = ranks.ok(
        "%%distributed\nfor group in list(c10d._world.pg_names):\n"
        "    if isinstance(group, Broken): del c10d._world.pg_names[group]\nprint('ran' in globals())"
    )
    assert outcome.lines == both("False")


# --- widgets


@pytest.mark.parametrize("error", ["ValueError('mine')", "SystemExit(3)", "KeyboardInterrupt"])
def test_a_widget_s_handler_that_raises_is_shown(ranks: Kernel, error: str) -> None:
    cell = ranks.start(
        "%%distributed -r 1\nimport comm\nchannel = comm.create_comm(target_name='test')\n"
        f"def handle(message):\n    print('handled')\n    raise {error}\nchannel.on_msg(handle)\nprint(channel.comm_id)"
    )
    identity = cell.finish().lines[1][0]
    message = ranks.client.session.msg("comm_msg", {"comm_id": identity, "data": {}})
    ranks.client.shell_channel.send(message)
    cell.wait_late("handled")
    cell.wait_late(error.split("(", maxsplit=1)[0])


def test_a_finalizer_that_closes_a_comm_while_an_item_is_sent_does_not_hang(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed -r 0\nimport comm, gc\nclass Closing:\n"
        "    def __init__(self): self.itself, self.comm = self, comm.create_comm(target_name='test')\n"
        "    def __del__(self):\n        sys.setprofile(None)\n        self.comm.close()\n        print('closed')\n"
        "def collect(frame, event, arg):\n    if frame.f_code.co_name in ('_send', '_send_now'): gc.collect()\n"
        "gc.disable(); Closing(); sys.setprofile(collect)\n"
        "display({'text/plain': 'shown'}, raw=True)\ngc.enable()"
    )
    assert "shown" in outcome.plain[0] and outcome.lines == {0: ["closed"]}
