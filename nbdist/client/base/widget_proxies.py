"""The kernel's side of widgets that live on ranks: each has a comm here that passes messages both ways."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from nbdist.wire.base.message import Message
from nbdist.wire.messages.output import WidgetMessage


class WidgetProxies:
    """The comms of one set of ranks.

    Args:
        send: Sends to the ranks.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send_message = send
        self._closed = False
        self._comms: dict[str, Any] = {}

    def relay(self, message: WidgetMessage) -> None:
        """Pass a rank's message on to the page."""
        try:
            self._relay(message)
        except Exception:  # an error on the page's side, or in a widget: the cell goes on
            traceback.print_exc()

    def _relay(self, message: WidgetMessage) -> None:
        if message.event == "comm_open":
            self._open(message)
            return
        proxy = self._comms.get(message.comm_id)
        if proxy is None:
            return
        if message.event == "comm_close":
            del self._comms[message.comm_id]
            proxy.close(message.data, message.metadata, message.buffers)
        else:
            proxy.send(message.data, message.metadata, message.buffers)

    def close(self) -> None:
        """Drop what the page still sends, and have the kernel forget the comms: the ranks are gone."""
        self._closed = True
        comms, self._comms = self._comms, {}
        if comms:
            import comm

            manager = comm.get_comm_manager()
            for proxy in comms.values():  # not closed, which would empty their displays on the page
                manager.unregister_comm(proxy)

    def _open(self, message: WidgetMessage) -> None:
        import comm

        proxy = comm.create_comm(
            target_name=message.target,
            data=message.data,
            metadata=message.metadata,
            buffers=message.buffers,
            comm_id=message.comm_id,
        )
        proxy.on_msg(lambda received: self._send("comm_msg", message, received))
        proxy.on_close(lambda received: self._send("comm_close", message, received))
        self._comms[message.comm_id] = proxy

    def _send(self, event: str, opened: WidgetMessage, received: dict[str, Any]) -> None:
        if self._closed:
            return
        data = received["content"].get("data", {})
        buffers = [bytes(buffer) for buffer in received.get("buffers", [])]
        self._send_message(
            WidgetMessage(
                opened.rank, event, opened.comm_id, opened.target, data, received.get("metadata", {}), buffers
            )
        )
