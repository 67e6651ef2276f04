"""A real kernel as a user has it, driven over its own protocol, and what its cells show."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from nbdist.base.ranks import parse_ranks

LIMIT = 60.0
_DUMP_SIGNAL = signal.SIGUSR2
_DUMP = "__import__('faulthandler').register({signal}, open({path!r}, 'w'))"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NAMED = re.compile(r"\[([\d,-]+)\] (.*)", re.DOTALL)


@dataclass
class Outcome:
    """What a user sees of a cell that has ended."""

    status: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    stdout: str = ""
    stderr: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def lines(self) -> dict[int, list[str]]:
        """What each rank printed to stdout, as `lines_by_rank` tells."""
        return lines_by_rank(self.stdout)

    @property
    def plain(self) -> list[str]:
        """The text of each display, updates applied."""
        return [data.get("text/plain", "") for data in self.displays]

    def __str__(self) -> str:
        error = f"{self.status} {self.ename}: {self.evalue}\n{self.traceback}"
        return f"{error}\nstdout: {self.stdout}\nstderr: {self.stderr}\n{self.plain}"


class Execution:
    """A cell that is running in a kernel."""

    def __init__(self, kernel: Kernel, message_id: str) -> None:
        self._client = kernel.client
        self._process = kernel.process
        self._stacks = kernel.stacks
        self._id = message_id
        self._began = time.monotonic()
        self._idle = False
        self._display_ids: dict[str, int] = {}
        self.outcome = Outcome()

    def wait_for(self, text: str, limit: float = LIMIT) -> None:
        """Until the cell has printed this."""
        self.wait_until(lambda outcome: text in outcome.stdout + outcome.stderr, f"the text {text!r}", limit)

    def wait_for_ranks(self, count: int, text: str, limit: float = LIMIT) -> None:
        """Until so many ranks have printed this line, whether or not they share it on the page."""
        self.wait_until(lambda outcome: _has_of(outcome, count, text), f"{text!r} of {count} ranks", limit)

    def wait_until(self, reached: Callable[[Outcome], bool], what: str = "it", limit: float = LIMIT) -> None:
        deadline = time.monotonic() + limit
        while not reached(self.outcome):
            assert not self._idle, f"the cell ended without {what}: {self.outcome}"
            self._step(deadline, what)

    def wait_late(self, text: str, limit: float = LIMIT) -> None:
        """Until this stands below the cell, which may have ended."""
        deadline = time.monotonic() + limit
        while not any(text in shown for shown in (self.outcome.stdout, self.outcome.stderr, *self.outcome.plain)):
            self._step(deadline, f"text {text!r}")

    def wait_late_for_ranks(self, count: int, text: str, limit: float = LIMIT) -> None:
        """Until so many ranks have printed this line below the cell, which may have ended."""
        deadline = time.monotonic() + limit
        while not _has_of(self.outcome, count, text):
            self._step(deadline, f"{text!r} of {count} ranks")

    def enter(self, line: str, limit: float = LIMIT) -> str:
        """Wait for a prompt, and enter a line there. Returns the prompt."""
        prompt = self.prompt(limit)
        self.enter_now(line)
        return prompt

    def enter_now(self, line: str) -> None:
        """Enter a line at the prompt that is there."""
        self._client.input(line)

    def prompt(self, limit: float = LIMIT) -> str:
        """Wait for a prompt, and return it."""
        deadline = time.monotonic() + limit
        while True:
            assert time.monotonic() < deadline and not self._idle, f"no prompt: {self.outcome}"
            with contextlib.suppress(queue.Empty):
                asked = self._client.get_stdin_msg(timeout=0.05)
                if asked["parent_header"].get("msg_id") == self._id:
                    return str(asked["content"]["prompt"])
            self._step(deadline, "a prompt", patience=0.05)

    def finish(self, limit: float = LIMIT) -> Outcome:
        """Until the cell has ended."""
        deadline = time.monotonic() + limit
        while not self._idle:
            if time.monotonic() >= deadline:
                raise AssertionError(f"no end in {limit:g} s: {self.outcome}\n{self._stacks()}")
            self._step(deadline, "an end")
        self.outcome.seconds = time.monotonic() - self._began
        while True:
            reply = self._client.get_shell_msg(timeout=max(0.1, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == self._id:
                break
        self.outcome.status = reply["content"]["status"]
        return self.outcome

    def _step(self, deadline: float, what: str, *, patience: float = 0.5) -> None:
        assert time.monotonic() < deadline, f"no {what} in time: {self.outcome}"
        try:
            message = self._client.get_iopub_msg(timeout=patience)
        except queue.Empty:
            code = self._process.poll()
            assert code is None, f"the kernel ended with exit code {code}, without {what}: {self.outcome}"
            return
        if message["parent_header"].get("msg_id") == self._id:
            self._note(message["msg_type"], message["content"])

    def _note(self, kind: str, content: dict[str, Any]) -> None:
        outcome = self.outcome
        outcome.events.append((kind, content))
        if kind == "status":
            self._idle = self._idle or content["execution_state"] == "idle"
        elif kind == "stream":
            setattr(outcome, content["name"], getattr(outcome, content["name"]) + content["text"])
        elif kind in ("display_data", "execute_result"):
            if identity := content.get("transient", {}).get("display_id"):
                self._display_ids[identity] = len(outcome.displays)
            outcome.displays.append(content["data"])
        elif kind == "update_display_data":
            index = self._display_ids.get(content["transient"].get("display_id"))
            if index is not None:
                outcome.displays[index] = content["data"]
        elif kind == "error":
            outcome.ename, outcome.evalue = content["ename"], content["evalue"]
            outcome.traceback = _ANSI.sub("", "\n".join(content["traceback"]))


class Kernel:
    """A kernel of this interpreter, driven over its own protocol.

    Args:
        command: What runs it, and so becomes it.
        environment: Variables that it has besides this process's.
    """

    def __init__(self, command: Sequence[str] = (), **environment: str) -> None:
        # Not TCP: the ports that a kernel is given may be taken by ranks' connections before it binds them.
        self._folder = tempfile.mkdtemp(prefix="kernel-", dir="/tmp")  # a socket's path is short
        self._context = _unbounded()
        address = f"{self._folder}/socket"
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=address, context=self._context)
        assert self.manager.kernel_spec is not None
        if command:
            self.manager.kernel_spec.argv[:1] = [*command, sys.executable]
        self._stacks = Path(self._folder, "stacks")
        dump = _DUMP.format(signal=int(_DUMP_SIGNAL), path=str(self._stacks))
        self.manager.kernel_spec.argv.append(f"--IPKernelApp.exec_lines={dump}")
        self.manager.start_kernel(env={**os.environ, **environment})
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=LIMIT)
        except BaseException:
            self.close()
            raise
        self.pid: int = self.process.pid

    @property
    def process(self) -> Popen[bytes]:
        """The process; another one after a restart by the manager."""
        return self.manager.provisioner.process  # type: ignore[union-attr]

    def stacks(self) -> str:
        """Where its threads are now."""
        size = self._stacks.stat().st_size
        self.process.send_signal(_DUMP_SIGNAL)
        with contextlib.suppress(AssertionError):  # a stopped process does not answer
            wait_until(lambda: self._stacks.stat().st_size > size, "its stacks")
        return self._stacks.read_text()[size:]

    def start(self, code: str, *, input_allowed: bool = False, hidden: bool = False) -> Execution:
        """Run a cell and don't wait for it.

        Args:
            code: Of the cell.
            input_allowed: Whether it may ask for a line, which `enter` gives.
            hidden: Whether it is no cell, but what a front end runs for itself.
        """
        return Execution(self, self.client.execute(code, allow_stdin=input_allowed, store_history=not hidden))

    def run(self, code: str, limit: float = LIMIT) -> Outcome:
        """Run a cell to its end."""
        return self.start(code).finish(limit)

    def ok(self, code: str, limit: float = LIMIT) -> Outcome:
        """Run a cell that must not fail."""
        outcome = self.run(code, limit)
        assert outcome.status == "ok", str(outcome)
        return outcome

    def fails(self, code: str, ename: str, limit: float = LIMIT) -> Outcome:
        """Run a cell that must fail with this error."""
        outcome = self.run(code, limit)
        assert outcome.ename == ename, str(outcome)
        return outcome

    def value(self, expression: str, limit: float = LIMIT) -> Any:
        """What an expression is worth in the kernel, through its repr."""
        import ast

        reply = self.client.execute("", user_expressions={"it": f"repr({expression})"}, reply=True, timeout=limit)
        found = reply["content"]["user_expressions"]["it"]
        assert found["status"] == "ok", f"{found['ename']}: {found['evalue']}"
        return ast.literal_eval(ast.literal_eval(found["data"]["text/plain"]))

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def reclaim(self) -> None:
        """Have it idle again if interrupts do that, whatever runs: for the next test after one that has failed."""
        for patience in (2.0, 5.0, 10.0, 20.0):
            if self.process.poll() is not None:
                return
            with contextlib.suppress(TimeoutError):
                self.client.kernel_info(reply=True, timeout=patience)
                return
            self.interrupt()

    def rank_pids(self) -> list[int]:
        """The processes of the ranks."""
        return list(self.value("[info.pid for info in __import__('nbdist').get_session().ranks]"))

    def close(self) -> None:
        """An orderly shutdown."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unbounded() -> zmq.Context[zmq.Socket[bytes]]:
    """Sockets that keep all that has come: else a kernel drops messages while the reader is slower than its cells."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.rcvhwm = 0
    return context


@contextlib.contextmanager
def kernel_with_ranks(count: int = 2, options: str = "", **environment: str) -> Iterator[Kernel]:
    """A kernel with nbdist loaded and a session running."""
    with Kernel(**environment) as kernel:
        kernel.ok("%load_ext nbdist")
        kernel.ok(f"%distributed start -n {count} {options}")
        yield kernel


def lines_by_rank(text: str) -> dict[int, list[str]]:
    """The lines of each rank, from text that names them: `[0-1] x` is the same here as `[0] x` and `[1] x`.

    Ranks share a line if it comes from all of them within 50 ms, which a busy machine may keep them from. When
    exactly they do is specified where the time is in a test's hands: tests/unit/test_merge.py.
    """
    found: dict[int, list[str]] = {}
    for line in text.removesuffix("\n").split("\n") if text else []:
        named = _NAMED.match(line)
        assert named, f"a line that names no rank: {line!r}"
        for rank in parse_ranks(named[1], 1000):
            found.setdefault(rank, []).append(named[2])
    return found


def ranks_with_line(text: str, line: str) -> list[int]:
    """The ranks that have printed a line, once for each time, whether or not they share it on the page."""
    named = re.compile(rf"^\[([\d,-]+)\] (?:\([^)]*\) )?{re.escape(line)}$", re.MULTILINE)
    return sorted(rank for ranks in named.findall(text) for rank in parse_ranks(ranks, 1000))


def _has_of(outcome: Outcome, count: int, line: str) -> bool:
    return len(set(ranks_with_line(outcome.stdout, line))) >= count


def both(*lines: str) -> dict[int, list[str]]:
    """What `lines_by_rank` gives if ranks 0 and 1 have printed these lines and nothing else."""
    return {rank: list(lines) for rank in (0, 1)}


def wait_until(reached: Callable[[], object], what: str | Callable[[], str], limit: float = 10.0) -> None:
    """Poll until something is true, with a bound: for what other processes do without telling.

    Args:
        reached: Whether it is.
        what: What is waited for; a function is called when it has not come in time.
        limit: Seconds.
    """
    deadline = time.monotonic() + limit
    while not reached():
        assert time.monotonic() < deadline, f"not in {limit:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
