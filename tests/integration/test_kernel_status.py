"""What a kernel says of itself, as a front end and a Jupyter server take it: the last status is the kernel's."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.kernel import LIMIT, Kernel

WAIT = """\
import pathlib, time
while not pathlib.Path({end!r}).exists():
    time.sleep(0.01)"""

WAIT_BEFORE_CODE = """
def wait(stream, message, identities):
    import pathlib, time
    while message["msg_type"] == "execute_request" and not pathlib.Path({begin!r}).exists():
        time.sleep(0.01)
    return True
get_ipython().kernel.should_handle = wait"""


@dataclass
class Said:
    state: str  # "busy" or "idle"
    about: str  # the id of the message that it is about


class Front:
    """A front end that reads every status. Before anything else it is asked about something, as a page is opened."""

    def __init__(self, kernel: Kernel) -> None:
        self._client = kernel.client
        self.heard: list[Said] = []

    def run(self, code: str) -> str:
        return self._client.execute(code)

    def ask(self) -> str:
        """Send what is answered beside a running cell, over the control channel."""
        return self._send("kernel_info_request", {}, self._client.control_channel)

    def open_line(self) -> str:
        """Send what is answered beside a running cell, in a thread of its own. No page of ours opens this one."""
        self._send("create_subshell_request", {}, self._client.control_channel)
        reply = self._client.get_control_msg(timeout=LIMIT)
        while "subshell_id" not in reply["content"]:
            reply = self._client.get_control_msg(timeout=LIMIT)
        subshell = reply["content"]["subshell_id"]
        opening = {"comm_id": subshell, "target_name": "nobody's", "data": {}}
        return self._send("comm_open", opening, self._client.shell_channel, subshell_id=subshell)

    def _send(self, kind: str, content: dict[str, Any], channel: Any, **header: str) -> str:
        message = self._client.session.msg(kind, content)
        message["header"].update(header)
        channel.send(message)
        return str(message["header"]["msg_id"])

    def wait_for(self, state: str, about: str) -> None:
        """Read on until this is said once more."""
        self._read_until(lambda said: said == Said(state, about))

    def _read_until(self, reached: Callable[[Said], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=0.5)
            except queue.Empty:
                continue
            if message["msg_type"] != "status":
                continue
            self.heard.append(Said(message["content"]["execution_state"], message["parent_header"].get("msg_id", "")))
            if reached(self.heard[-1]):
                return
        raise AssertionError(f"not in {LIMIT:g} s: {self.heard}")


@pytest.mark.parametrize("before", ["%load_ext nbdist", ""], ids=["loaded", "loads"])
@pytest.mark.parametrize("beside", [Front.ask, Front.open_line])
def test_a_kernel_that_answers_while_it_runs_a_cell_is_still_busy(
    beside: Callable[[Front], str], before: str, kernel: Kernel, tmp_path: Path
) -> None:
    kernel.ok(before)
    front = Front(kernel)
    cell = front.run("%reload_ext nbdist\nprint('loaded')\n" + WAIT.format(end=str(tmp_path / "end")))
    while kernel.client.get_iopub_msg(timeout=LIMIT)["msg_type"] != "stream":
        pass  # nbdist is loaded
    front.wait_for("idle", beside(front))
    front.wait_for("busy", cell)
    (tmp_path / "end").touch()
    front.wait_for("idle", cell)


@pytest.mark.parametrize("beside", [Front.ask, Front.open_line])
def test_a_kernel_that_answers_after_a_cell_is_idle(beside: Callable[[Front], str], kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    front = Front(kernel)
    cell = front.run("pass")
    front.wait_for("idle", cell)
    asked, ended = beside(front), len(front.heard)
    front.wait_for("idle", asked)
    front.wait_for("idle", front.run("pass"))
    assert cell not in {said.about for said in front.heard[ended:]}


def test_a_cell_is_busy_also_if_something_is_answered_just_before_its_code(kernel: Kernel, tmp_path: Path) -> None:
    begin, end = tmp_path / "begin", tmp_path / "end"
    kernel.ok("%load_ext nbdist\n" + WAIT_BEFORE_CODE.format(begin=str(begin)))
    front = Front(kernel)
    cell = front.run(WAIT.format(end=str(end)))
    front.wait_for("busy", cell)
    front.wait_for("idle", front.ask())
    begin.touch()
    front.wait_for("busy", cell)
    end.touch()
    front.wait_for("idle", cell)


def test_a_cell_is_never_busy_after_its_end(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    front = Front(kernel)
    cells = []
    for _ in range(100):
        for _ in range(3):
            front.ask()
        cells.append(front.run("pass"))
        for _ in range(3):
            front.ask()
        front.wait_for("idle", cells[-1])
    front.wait_for("idle", front.ask())  # answered after all others
    front.wait_for("idle", front.run("pass"))
    for cell in cells:
        assert [said.state for said in front.heard if said.about == cell][-1] == "idle"
