"""What a button of JupyterLab's page takes while a cell runs on 8 ranks: to be answered, and to act on the ranks.

The kernel gets the messages that the page sends, without a browser and the Jupyter server in between.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import _tools

if TYPE_CHECKING:
    from testbed.kernel import Kernel

RANKS = 8
ROUNDS = 50
BUDGET = 50e-3
CELL = "%%distributed\nimport time\nprint('go', flush=True)\nwhile True: time.sleep(0.01)"


def main() -> None:
    _tools.prepare()
    from testbed.kernel import kernel_with_ranks

    with kernel_with_ranks(RANKS) as kernel:
        page = Page(kernel)
        samples = _tools.rounds(ROUNDS, {"interrupt": lambda: _interrupt(kernel, page)}, warm_up=2)
        cell = kernel.start(CELL)
        cell.wait_for_ranks(RANKS, "go")
        samples |= _tools.rounds(ROUNDS, {"state": _tools.timed(lambda: page.ask("state"))}, warm_up=2)
        page.ask("interrupt-now")
        cell.finish()
    _tools.header(f"a button while a cell runs on {RANKS} ranks")
    _tools.row("how the session is: asked and answered", samples["state"], **_tools.limit(BUDGET))
    _tools.row("interrupt now: until the cell has ended on all ranks", samples["interrupt"], **_tools.limit(BUDGET))


class Page:
    """The messages of a page, which go over the control channel.

    Args:
        kernel: The kernel, which has loaded nbdist.
    """

    def __init__(self, kernel: Kernel) -> None:
        from nbdist.wire.pages.page_messages import PAGE_PROTOCOL
        from nbdist.wire.pages.targets import PAGE_TARGET

        self._client = kernel.client
        self._numbers = itertools.count(1)
        self._send("comm_open", target_name=PAGE_TARGET, data={"page": "benchmark", "protocol": PAGE_PROTOCOL})
        self._read_until(lambda news: news["type"] == "state")

    def begin(self, what: str) -> int:
        """Ask for something, and return the question's number."""
        number = next(self._numbers)
        self._send("comm_msg", data={"request": {"id": number, "do": what}})
        return number

    def ask(self, what: str) -> None:
        """Ask for something, and wait for the answer."""
        number = self.begin(what)
        self._read_until(lambda news: news["type"] == "reply" and news["id"] == number)

    def _send(self, kind: str, **content: Any) -> None:
        self._client.control_channel.send(self._client.session.msg(kind, {"comm_id": "benchmark", **content}))

    def _read_until(self, reached: Any) -> None:
        while True:
            message = self._client.get_iopub_msg(timeout=60)
            if message["msg_type"] == "comm_msg" and reached(message["content"]["data"]):
                return


def _interrupt(kernel: Kernel, page: Page) -> float:
    cell = kernel.start(CELL)
    cell.wait_for_ranks(RANKS, "go")
    began = time.perf_counter()
    page.begin("interrupt-now")
    cell.finish()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
