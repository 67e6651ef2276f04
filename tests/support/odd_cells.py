"""Cells that leave something odd behind, and what has to hold after each: the rows of docs/reliability.md.

Both the table's tests and the fuzzer of cells take them from here.
"""

from __future__ import annotations

from dataclasses import dataclass

WORKS = "the cell ends"
FAILS = "the cell fails"
DIES = "the rank dies, and the error names how"


@dataclass(frozen=True)
class OddCell:
    """A cell and what follows from it.

    Attributes:
        name: In tests and figures.
        situation: What the cell does, in words.
        code: What it runs, on every rank that it is sent to. `path` is a folder of the test's.
        outcome: WORKS, FAILS or DIES.
        remains: What stays behind for later cells, in words; "" for nothing.
        silent: Whether what the cell prints after `code` is lost or comes twice, as the code asks for.
        fuzzed: Whether the fuzzer uses it; not if it takes long or if what remains changes what later cells do.
        shown: Text that the error must contain, where the cell fails or the rank dies.
    """

    name: str
    situation: str
    code: str
    outcome: str = WORKS
    remains: str = ""
    silent: bool = False
    fuzzed: bool = True
    shown: str = ""


_OUTPUT = [
    OddCell(
        "closed-stdout",
        "closes `sys.stdout`",
        "import sys\nsys.stdout.close()",
        silent=True,
        remains="nothing: the next cell prints again",
    ),
    OddCell(
        "redirected-descriptor",
        "points descriptor 1 at a file with `os.dup2` and leaves it so",
        "import os\nfile = os.open(f'{path}/log-{rank}', os.O_WRONLY | os.O_CREAT | os.O_APPEND)\nos.dup2(file, 1)",
        silent=True,
        remains="nothing: the next cell prints to the notebook again",
    ),
    OddCell(
        "closed-descriptor",
        "closes descriptor 1",
        "import os\nos.close(1)",
        silent=True,
        remains="nothing: the next cell prints again",
    ),
    OddCell(
        "nonblocking-pipe",
        "leaves O_NONBLOCK on descriptor 1, as node.js does",
        "import os\nos.set_blocking(1, False)\nfor _ in range(20):\n    print('y' * 50_000)",
    ),
    OddCell(
        "closed-redirect",
        "redirects stdout into a buffer and closes it while a thread still prints",
        "import contextlib, io, threading\n"
        "go = threading.Event()\n"
        "def late():\n    go.wait(5)\n    print('late')\n"
        "thread = threading.Thread(target=late)\nthread.start()\n"
        "buffer = io.StringIO()\n"
        "with contextlib.redirect_stdout(buffer):\n    print('inside')\n"
        "buffer.close()\ngo.set()\nthread.join()",
    ),
    OddCell(
        "raw-bytes",
        "writes bytes that are not UTF-8, and something like nbdist's own marks",
        "import os\nos.write(1, b'\\xff\\xfe\\x00\\x1b]nbdist;0123456789abcdef;7;0\\x07\\n')",
    ),
    OddCell("long-line", "prints a line of 3 MB", "print('x' * 3_000_000)"),
    OddCell("flood", "prints 20,000 lines", "for number in range(20_000):\n    print('line', number)"),
    OddCell("partial-line", "prints without a newline", "print('no end', end='')\nprint()", remains="nothing"),
    OddCell(
        "late-thread",
        "leaves a thread that prints after the cell",
        "import threading\n"
        "finished = threading.Event()\n"
        "def late():\n    finished.wait(0.05)\n    print('late')\n"
        "threading.Thread(target=late, daemon=True).start()",
        remains="the thread; its output appears below the cell",
    ),
    OddCell(
        "odd-displays",
        "displays what JSON can't hold: int keys, bytes, NaN, an object",
        "from IPython.display import display\n"
        "display({'text/plain': 'a', 'application/json': {1: float('nan'), 'x': b'y', 'z': object()}}, raw=True,\n"
        "        metadata={1: 2})",
    ),
    OddCell(
        "raising-repr",
        "displays a value that raises when it is shown",
        "class Shy:\n    def __repr__(self):\n        raise ValueError('shy')\n"
        "from IPython.display import display\ndisplay(Shy())",
        FAILS,
        shown="shy",
    ),
]

_PROCESSES = [
    OddCell(
        "fork-that-exits",
        "forks a child that ends with `os._exit`",
        "import os\nchild = os.fork()\nif child == 0:\n    os._exit(0)\nos.waitpid(child, 0)",
    ),
    OddCell(
        "fork-that-stays",
        "forks a child that forgets to end",
        "import os\nchild = os.fork()",
        silent=True,
        remains="nothing: the child ends with the cell",
    ),
    OddCell(
        "fork-that-raises",
        "forks a child that raises",
        "import os\nchild = os.fork()\nif child == 0:\n    raise RuntimeError('in the child')\nos.waitpid(child, 0)",
    ),
    OddCell(
        "orphans",
        "starts programs that outlive their parents",
        "import subprocess\nsubprocess.run('(sleep 0.01 &) ; (sleep 0.02 &)', shell=True, check=True)",
        remains="nothing: they are reaped, or end with the rank",
    ),
    OddCell(
        "subprocess-that-stays",
        "leaves a subprocess running",
        "import subprocess\nleft = subprocess.Popen(['sleep', '0.2'])",
        remains="the subprocess; it ends with the rank at the latest",
    ),
    OddCell(
        "multiprocessing",
        "uses a pool of forked processes",
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n    assert pool.map(abs, [-1, -2]) == [1, 2]",
    ),
    OddCell(
        "loader-workers",
        "iterates over a DataLoader with workers and breaks off",
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "for batch in DataLoader(list(range(8)), num_workers=1):\n    break",
    ),
    OddCell(
        "ignored-children",
        "ignores SIGCHLD",
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        remains="the setting, until `signal.signal` is called again; exit codes of children read 0, as in Python",
        fuzzed=False,
    ),
]

_SIGNALS = [
    OddCell(
        "ignored-interrupts",
        "ignores SIGINT",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)",
        remains="nothing: interrupts reach the next cell",
    ),
    OddCell(
        "blocked-interrupts",
        "blocks SIGINT in the main thread",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})",
        remains="nothing: interrupts reach the next cell",
    ),
    OddCell(
        "default-interrupts",
        "restores Python's own handler of SIGINT",
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)",
        remains="nothing: interrupts reach the next cell",
    ),
    OddCell(
        "timer-that-raises",
        "leaves a timer that would raise after the cell",
        "import signal\n"
        "def late(*_):\n    raise TimeoutError('too late')\n"
        "signal.signal(signal.SIGALRM, late)\nsignal.setitimer(signal.ITIMER_REAL, 0.05)",
        outcome=WORKS,
        remains="nothing: a timer ends with its cell",
        fuzzed=False,  # it may also fire inside the cell
    ),
]

_STATE = [
    OddCell("odd-names", "puts names into `globals()` that are not text", "globals()[1] = 2\nglobals()[None] = 3"),
    OddCell("odd-text-name", "names a variable with a lone surrogate", "globals()['caf\\udce9'] = 1"),
    OddCell(
        "removed-folder",
        "works in a folder that is removed",
        "import os, tempfile\nhome = os.getcwd()\ngone = tempfile.mkdtemp()\nos.chdir(gone)\nos.rmdir(gone)",
        remains="the rank's folder, until `os.chdir`",
        fuzzed=False,
    ),
    OddCell(
        "environment",
        "clears `os.environ`",
        "import os\nkept_environ = dict(os.environ)\nos.environ.clear()\nos.environ.update(kept_environ)",
    ),
    OddCell(
        "odd-environment",
        "sets a variable of the environment that is not UTF-8",
        "import os\nos.environ['ODD'] = 'caf\\udce9'",
        remains="the variable, on that rank",
    ),
    OddCell(
        "warnings-as-errors",
        "turns all warnings into errors",
        "import warnings\nwarnings.simplefilter('error')",
        remains="the setting, as in Python",
    ),
    OddCell(
        "recursion-limit",
        "lowers the recursion limit",
        "import sys\nsys.setrecursionlimit(200)",
        remains="the setting, as in Python",
        fuzzed=False,
    ),
    OddCell(
        "few-descriptors",
        "lowers the limit of open files",
        "import os, resource\nsoft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 1, hard))",
        remains="the limit; a value that needs a descriptor is refused by name",
        fuzzed=False,
    ),
    OddCell(
        "trace-that-raises",
        "leaves a trace function that raises",
        "import sys\ndef trace(*_):\n    raise ValueError('trace')\nsys.settrace(trace)",
        outcome=FAILS,
        remains="nothing: Python removes such a function",
        fuzzed=False,
    ),
    OddCell("closed-loop", "closes the event loop", "import asyncio\nasyncio.get_event_loop().close()"),
    OddCell("no-loop", "removes the event loop", "import asyncio\nasyncio.set_event_loop(None)"),
    OddCell(
        "default-dtype",
        "sets torch's default dtype",
        "import torch\ntorch.set_default_dtype(torch.float64)",
        remains="the setting, as in PyTorch",
    ),
    OddCell(
        "default-device",
        "sets torch's default device",
        "import torch\ntorch.set_default_device('meta')",
        remains="the setting, as in PyTorch",
    ),
    OddCell(
        "no-gc", "switches the garbage collector off", "import gc\ngc.disable()", remains="the setting, as in Python"
    ),
    OddCell(
        "reset",
        "deletes all variables with `%reset -f`",
        "%reset -f",
        remains="nothing of the user's; `rank`, `world_size` and the others are there again",
        fuzzed=False,
    ),
    OddCell(
        "held-interpreter",
        "holds the interpreter's lock in C for a while",
        "import ctypes\nctypes.PyDLL(None).usleep(50_000)",
    ),
    OddCell(
        "coroutine",
        "awaits at top level and leaves a task",
        "import asyncio\nasync def forever():\n    await asyncio.sleep(1000)\n"
        "task = asyncio.ensure_future(forever())\nawait asyncio.sleep(0)",
        remains="the task; it goes on while a later cell awaits",
    ),
]

_ERRORS = [
    OddCell("raises", "raises", "1 / 0", FAILS, shown="ZeroDivisionError"),
    OddCell("syntax-error", "does not compile", "x ==== 1", FAILS, shown="SyntaxError"),
    OddCell(
        "surrogate-error",
        "raises with text that is not Unicode",
        "raise ValueError('caf\\udce9')",
        FAILS,
        shown="ValueError",
    ),
    OddCell(
        "odd-error-name",
        "raises an exception of a class with an odd name",
        "raise type('Caf\\udce9', (Exception,), {})('odd')",
        FAILS,
        shown="odd",
    ),
    OddCell(
        "unprintable-error",
        "raises an exception that can't be printed",
        "class Mute(Exception):\n    def __str__(self):\n        raise ValueError('mute')\nraise Mute",
        FAILS,
        shown="Mute",
    ),
    OddCell(
        "unpicklable-error",
        "raises an exception that can't be pickled",
        "class Stuck(Exception):\n    def __reduce__(self):\n        raise ValueError('stuck')\nraise Stuck('here')",
        FAILS,
        shown="Stuck",
    ),
    OddCell(
        "long-error",
        "raises an exception with a text of 5 MB",
        "raise ValueError('x' * 5_000_000)",
        FAILS,
        shown="ValueError",
    ),
    OddCell(
        "deep-recursion", "recurses without end", "def again():\n    again()\nagain()", FAILS, shown="RecursionError"
    ),
    OddCell(
        "out-of-memory", "asks for more memory than there is", "x = bytearray(1 << 60)", FAILS, shown="MemoryError"
    ),
    OddCell(
        "base-exception",
        "raises a BaseException of its own",
        "class Stop(BaseException):\n    pass\nraise Stop('now')",
        FAILS,
        shown="Stop",
    ),
    OddCell("generator-exit", "raises GeneratorExit", "raise GeneratorExit", FAILS, shown="GeneratorExit"),
    OddCell("exit-with-code", "calls `sys.exit(3)`", "import sys\nsys.exit(3)", FAILS, shown="SystemExit"),
    OddCell("exit", "calls `sys.exit()`", "import sys\nsys.exit()", silent=True),
    OddCell(
        "finalizer",
        "leaves an object whose finalizer raises",
        "class Late:\n    def __del__(self):\n        raise ValueError('late')\nlate = Late()\ndel late",
    ),
    OddCell(
        "thread-that-raises",
        "leaves a thread that raises",
        "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()",
        remains="nothing; its traceback is printed",
    ),
]

_COLLECTIVES = [
    OddCell(
        "unwaited-collective",
        "starts a collective and does not wait for it",
        "import torch, torch.distributed as dist\n"
        "pending = dist.all_reduce(torch.ones(1000, device=device), async_op=True)",
    ),
    OddCell(
        "caught-time-out",
        "catches the time-out of a collective",
        "import datetime, torch.distributed as dist\n"
        "if rank == 0:\n    try: dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.1))\n"
        "    except RuntimeError: pass",
        remains="nothing: the process group is rebuilt",
    ),
    OddCell(
        "raises-before-collective",
        "raises on one rank while the others enter a collective",
        "import torch, torch.distributed as dist\n"
        "if rank == 0:\n    raise RuntimeError('not today')\n"
        "dist.all_reduce(torch.ones(1, device=device))",
        FAILS,
        shown="not today",
    ),
    OddCell(
        "raises-after-collective",
        "raises on one rank behind a collective",
        "import torch, torch.distributed as dist\n"
        "dist.all_reduce(torch.ones(1, device=device))\n"
        "if rank == 0:\n    raise RuntimeError('not today')",
        FAILS,
        shown="not today",
    ),
    OddCell(
        "new-group",
        "makes a process group and forgets it",
        "import torch.distributed as dist\ngroup = dist.new_group()\ndel group",
    ),
    OddCell(
        "raises-in-new-group",
        "raises on one rank while the others make a group",
        "import torch.distributed as dist\n"
        "if rank == 0:\n    raise RuntimeError('not today')\n"
        "group = dist.new_group()",
        FAILS,
        shown="not today",
    ),
]

_DEATHS = [
    OddCell(
        "killed",
        "is killed",
        "import os, signal\nif rank == 0:\n    os.kill(os.getpid(), signal.SIGKILL)",
        DIES,
        shown="SIGKILL",
    ),
    OddCell("hard-exit", "calls `os._exit(7)`", "import os\nif rank == 0:\n    os._exit(7)", DIES, shown="exit code 7"),
    OddCell(
        "segmentation-fault",
        "reads from address 0",
        "import ctypes\nif rank == 0:\n    ctypes.string_at(0)",
        DIES,
        shown="SIGSEGV",
    ),
    OddCell(
        "closed-descriptors",
        "closes every descriptor above 2",
        "import os\nif rank == 0:\n    os.closerange(3, 4096)",
        DIES,
        shown="SIG",  # SIGABRT of libzmq's, or SIGSEGV of a thread that is on its way out then
    ),
]

ODD_CELLS = [*_OUTPUT, *_PROCESSES, *_SIGNALS, *_STATE, *_ERRORS, *_COLLECTIVES, *_DEATHS]
