"""NCCL's process group: its interface, without a GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch


class NcclBackend:
    """What ProcessGroupNCCL offers, as far as it is used."""

    class Options:
        _timeout = timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        self.store, self.options = store, options or self.Options()
        self.number, self.aborted, self.counts = 0, False, False

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborted = True

    def _set_sequence_number_for_group(self) -> None:
        self.counts = True

    def _get_sequence_number_for_group(self) -> int:
        return self.number


class Group:
    """What ProcessGroup offers, as far as it is used: a slot is taken once and for all."""

    class BackendType(int): ...

    group_name, group_desc = "0", "default_pg"

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def __init__(self, backend: NcclBackend) -> None:
        self._slots: dict[int, Any] = {6: backend}
        self._backend = backend
        self._device_types = [torch.device("cuda")]

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _get_backend(self, device: Any) -> NcclBackend:
        assert device.type == "cuda"
        return self._backend

    def _register_backend(self, device: Any, slot: int, backend: NcclBackend) -> None:
        self._backend = self._slots.setdefault(slot, backend)
