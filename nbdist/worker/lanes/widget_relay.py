"""Widgets that live on a rank (ipywidgets, tqdm.notebook): their comms are relayed to the page and back.

Knows the comm package's interface; knows nothing of the page.
"""

from __future__ import annotations

from typing import Any

import comm
from comm.base_comm import BaseComm

from nbdist.wire.messages.output import WidgetMessage
from nbdist.worker.lanes.display_lane import DisplayLane


class WidgetRelay:
    """Makes this process's comms talk through the rank's display lane."""

    def __init__(self, lane: DisplayLane) -> None:
        class RankComm(BaseComm):
            def publish_msg(
                self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
            ) -> None:
                target = keys.get("target_name", "")
                raw = [bytes(buffer) for buffer in buffers or []]
                lane.relay(msg_type, self.comm_id, target, data or {}, metadata or {}, raw)

        comm.create_comm = RankComm

    def deliver(self, message: WidgetMessage) -> None:
        """Hand a message of the page to its widget. Runs on the main thread, between cells, as in a notebook."""
        content = {"comm_id": message.comm_id, "data": message.data}
        envelope = {"content": content, "metadata": message.metadata, "buffers": list(message.buffers)}
        manager = comm.get_comm_manager()
        handle: Any = manager.comm_close if message.event == "comm_close" else manager.comm_msg
        handle(None, None, envelope)
