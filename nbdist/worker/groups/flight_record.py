"""Collectives that this rank has started and that have not ended, by torch's own record of them: its flight recorder.

While cells are watched, only the counters of each group are read, which torch keeps up to date by itself: its list of
collectives asks CUDA, and is read only when the user wants it. Probes what it uses; where torch keeps no record,
nothing is known. Independent of cells or other ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nbdist.wire.questions.stopping import Collective, Flight
from nbdist.worker.groups import torch_groups

Unfinished = Mapping[str, tuple[int, int]]

_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "BFloat16": "bfloat16",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Bool": "bool",
}
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, of gloo and others


class Record:
    """What torch has recorded of this process."""

    def __init__(self) -> None:
        self._given_up: dict[str, int] = {}  # by backend, its last collective that was started then

    def unfinished(self) -> Unfinished | None:
        """Return collectives that were started and have not ended. From any thread.

        Returns:
            For each backend that has some, the number of its last that was started, and of its last that has ended;
            None: torch keeps no record.
        """
        found = {f"{dump} {backend}": counts for dump, text in torch_dumps() for backend, counts in parse(text).items()}
        if not found:
            return None
        return {
            name: (started, ended)
            for name, (started, ended) in found.items()
            if started > ended and started != self._given_up.get(name)
        }

    def give_up(self) -> None:
        """Leave out from now on what has not ended, as the groups were aborted: it never will.

        How much had ended before, torch may note late, so that does not count.
        """
        self._given_up |= {name: started for name, (started, _) in (self.unfinished() or {}).items()}


def last_collectives(count: int) -> Flight:
    """Return the last collectives that this process has started, the oldest first. Takes all threads up to 0.1 s."""
    entries: list[dict[str, Any]] = []
    recorded = False
    for _, dump in torch_dumps(single=True):
        found = json.loads(dump)
        recorded = recorded or bool(found.get("entries"))
        entries += [entry for entry in found.get("entries", []) if not entry.get("is_p2p")]
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    return Flight([_collective(entry) for entry in entries[-count:]], list(torch_groups.living()), recorded)


def _collective(entry: Mapping[str, Any]) -> Collective:
    name, description = entry["process_group"]
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    tensors = [f"{_dtype(dtype)}{list(size)}" for size, dtype in zip(sizes, dtypes, strict=False)]
    return Collective(
        str(name),
        group_label(str(name), str(description)),
        int(entry["collective_seq_id"]),
        str(entry["profiling_name"]).rpartition(":")[2].strip("_"),
        ", ".join(tensors),
        bool(entry["retired"]) or entry["state"] == "completed",
    )


def _dtype(name: str) -> str:
    """Return torch's name for what its native code calls "Float"."""
    return _DTYPES.get(name, name.lower())


def group_label(name: str, description: str) -> str:
    """Return a group in words."""
    if description == "default_pg":
        return "the default group"
    return f"group {name}" if description in ("", "undefined") else f"group {description}"


def parse(dump: str | bytes) -> dict[str, tuple[int, int]]:
    """Return the last collective started, and the last ended, of each backend in one of torch's dumps."""
    return {
        backend: (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
        for backend, status in json.loads(dump).get("pg_status", {}).items()
    }


def torch_dumps(*, single: bool = False) -> Iterator[tuple[str, str | bytes]]:
    """Yield what torch has recorded, by the name of the function that gives it. `single`: with all collectives."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    for name in DUMPS:
        dump = getattr(c10d, name, None)
        if dump is not None:
            yield name, dump(single)
