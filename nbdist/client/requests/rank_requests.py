"""What the ranks of a session can be asked for, besides running code: values, memory, their state and their stacks."""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nbdist import transfer
from nbdist.base.ranks import describe_ranks, format_ranks
from nbdist.base.text import nearest
from nbdist.client.base import interruption
from nbdist.client.base.results import CellResult
from nbdist.client.ranks.rank_set import Ranks, RankSet
from nbdist.client.ranks.task import Task
from nbdist.client.reports.flight import COUNT
from nbdist.client.reports.logs import read_logs
from nbdist.client.requests.debugging import debug, serve_debugpy
from nbdist.client.requests.status import look_at_flight, look_at_stacks, status_of
from nbdist.errors import NbdistError, RankError, TransferError, UsageError
from nbdist.metrics.allocation import memory_snapshot


def record(rank_set: RankSet, events: int) -> None:
    """Record allocations and frees on ranks from now on, as many on each; 0 stops recording.

    Raises:
        UsageError: No rank has a GPU.
    """
    living = rank_set.living()
    _check_gpus(rank_set, living)
    rank_set.set_up(memory_snapshot.record, events, ranks=living)


def write(rank_set: RankSet, rank: int, path: str | Path | None) -> Path:
    """Write the snapshot of a rank; None for `snapshot-rank0.pickle` in the current folder. Returns the file.

    Raises:
        UsageError: The rank has no GPU.
        RankError: This torch doesn't support it.
    """
    _check_gpus(rank_set, [rank])
    target = Path(path or f"snapshot-rank{rank}.pickle").expanduser().resolve()
    rank_set.set_up(memory_snapshot.write, target, ranks=[rank])
    return target


def _check_gpus(rank_set: RankSet, ranks: Sequence[int]) -> None:
    if ranks and all(info.device == "cpu" for info in rank_set.ranks if info.rank in ranks):
        raise UsageError(memory_snapshot.NO_GPU)


def check_named(values: object) -> None:
    """Check what `push` was given.

    Raises:
        UsageError: It is not a dict, or a name is not a variable name.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"push takes a dict, not {type(values).__name__}: `session.push({{'x': x}})`")
    for name in values:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"{name!r} is not a variable name: `session.push({{'x': x}})`")


def pack_named(values: Mapping[str, Any]) -> transfer.Packed:
    """Pack all values in one parcel, so that tensors that share memory still do; an error names the variable."""
    try:
        return transfer.pack(dict(values), name=next(iter(values)) if len(values) == 1 else "values")
    except TransferError:
        for name, value in values.items():
            transfer.check(value, name=name)
        raise


def explain_missing(name: str, task: Task, error: RankError, names: Mapping[int, Sequence[str]]) -> NbdistError:
    """Return the error for a `pull` that failed: which ranks lack the name, and which have it or a similar one."""
    missing = [
        rank
        for rank, failure in task.failures.items()
        if failure.name == "NameError" and _lacks(names.get(rank, ()), name)
    ]
    if len(missing) != len(task.failures):
        return error
    have = [rank for rank in task.ranks if rank not in missing]
    text = f"{describe_ranks(sorted(missing))} {'has' if len(missing) == 1 else 'have'} no {name!r}"
    if have:
        verb = "has" if len(have) == 1 else "have"
        text += f" ({describe_ranks(have)} {verb}: `%distributed pull {name} -r {format_ranks(have)}`)"
    if close := nearest(name, {known for rank in missing for known in names.get(rank, [])}, 3):
        text += f"; similar names: {', '.join(sorted(close))}"
    elif not have:
        text += "; define it in a `%%distributed` cell first"
    return UsageError(text)


def _lacks(known: Sequence[str], expression: str) -> bool:
    """Return whether an expression uses an unknown name; otherwise what it calls has raised."""
    used = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
    return not used <= {*known, *vars(builtins)}


class RankRequests:
    """The requests that go to ranks as they are. A `Session` adds how ranks begin, end, and run code."""

    _rank_set: RankSet

    def call(self, function: Callable[..., Any], *args: Any, ranks: Ranks = None, **kwargs: Any) -> list[Any]:
        """Call a function on ranks. The function, its arguments and its return value are sent by value.

        Returns:
            The return values, in the order of the ranks.

        Raises:
            TransferError: Something can't be sent; the text names it.
            RankError: A rank raised.
        """
        return self._rank_set.call("call", function, args, kwargs, ranks)

    def push(self, values: Mapping[str, Any], ranks: Ranks = None) -> None:
        """Set variables on ranks. Tensors arrive on the CPU; each rank's copy is its own.

        Raises:
            UsageError: A name is not a variable name.
            TransferError: A value can't be sent; the text names the part that can't.
        """
        check_named(values)
        with contextlib.ExitStack() as stack:
            packed = stack.enter_context(pack_named(values))
            with interruption.deferred():
                self._rank_set.submit("push", ", ".join(values), ranks, parcel=packed.parcel).wait()

    def pull(self, name: str, ranks: Ranks = None) -> Any:
        """Get a variable (or any expression) from ranks.

        Args:
            name: The variable.
            ranks: The ranks; None for all; a single number gives that rank's value itself.

        Returns:
            The values, in the order of the ranks.

        Raises:
            UsageError: Some ranks have no such variable; the text names them.
        """
        chosen = [ranks] if isinstance(ranks, int) else ranks
        with interruption.deferred():
            task = self._rank_set.submit("pull", name, chosen)
            try:
                values = self._rank_set.fetch(task)
            except RankError as error:
                raise explain_missing(name, task, error, self._rank_set.traffic.names) from None
        return values[0] if isinstance(ranks, int) else values

    def free(self) -> dict[int, dict[str, int]]:
        """Free what only tracebacks, `Out` and caches keep alive, on all ranks.

        Returns:
            By rank, in bytes: "private" (freed memory used only by its process), "device" (GPU memory that torch gave
            back), and what is left of both: "private_left", "device_left" (reserved by torch).
        """
        with interruption.deferred():
            task = self._rank_set.submit("free", "", self._rank_set.living())
            task.wait()
        return {rank: msgspec.msgpack.decode(task.replies[rank].payload) for rank in task.ranks}

    def record_snapshots(self, events: int = memory_snapshot.EVENTS) -> None:
        """Record allocations and frees of device memory on ranks from now on, for `snapshot`.

        Args:
            events: How many each rank keeps; 0 stops recording.

        Raises:
            UsageError: No rank has a GPU.
        """
        record(self._rank_set, events)

    def snapshot(self, rank: int, path: str | Path | None = None) -> Path:
        """Write torch's memory snapshot of a rank, for https://pytorch.org/memory_viz.

        Args:
            rank: The rank.
            path: The file; None for `snapshot-rank0.pickle` in the notebook's folder.

        Returns:
            The file.

        Raises:
            UsageError: The rank has no GPU.
            RankError: This torch doesn't support it.
        """
        return write(self._rank_set, rank, path)

    def interrupt(self, ranks: Ranks = None, *, now: bool = False) -> bool:
        """Stop what ranks run, after the current step if they train. A second call stops them at once.

        Args:
            ranks: The ranks; None for all.
            now: Don't wait for the end of a step, or for a rank to leave a collective by itself.

        Returns:
            Whether any of them ran something.
        """
        chosen = self._rank_set.choose(ranks, living=False)
        tasks = set(self._rank_set.traffic.running(chosen).values())
        for task in tasks:
            task.interrupt(chosen, now=now)
        return bool(tasks)

    def debug(self, rank: int | None = None) -> None:
        """Open IPython's debugger on a rank, at what failed there in its last cell.

        Args:
            rank: The rank; None for the one that failed first.

        Raises:
            UsageError: Nothing has failed there, or its frames are gone because another cell has begun.
            SessionBusy: The rank runs something.
            InteractionError: Nobody can type commands here.
        """
        debug(self._rank_set, rank)

    def debugpy(self, ranks: Ranks) -> str:
        """Have ranks listen on loopback for VS Code's debugger, until they end.

        Args:
            ranks: The ranks.

        Returns:
            The configurations for VS Code, and how to reach ranks on other machines.
        """
        return serve_debugpy(self._rank_set, ranks)

    def status(self) -> list[dict[str, Any]]:
        """Return a row for every rank.

        Returns:
            For each rank: rank, node, pid, device, state, generation, memory (bytes that it alone holds), device_memory
            (bytes on its GPU), device_memory_by, doing. device_memory_by is "torch", which reports what its allocator
            holds; or "driver", where the rank waits inside of that allocator, or is in a call that blocks Python: all
            that the process has, CUDA's context and NCCL's buffers included; or "" where device_memory is None.
        """
        return status_of(self._rank_set)

    @property
    def setup_cells(self) -> list[int]:
        """The numbers of the cells that ranks run which replace dead ones: those marked by `%%distributed --setup`."""
        return self._rank_set.traffic.status().setup

    def stacks(self, ranks: Ranks = None, *, native: bool = False) -> dict[int, str]:
        """Return where the main threads of ranks are: the whole stack from the user's cell inwards.

        Args:
            ranks: The ranks; None for all that live.
            native: Whether to include the frames of C code, using py-spy.

        Returns:
            The stacks by rank, a line per call; "idle" for a rank that runs nothing.

        Raises:
            UsageError: `native`, and py-spy is not installed or the system does not allow it.
        """
        return {rank: str(found) for rank, found in look_at_stacks(self._rank_set, ranks, native=native).items()}

    def flight(self, ranks: Ranks = None, count: int = COUNT) -> str:
        """Return the last collectives of ranks side by side, with the first in which they differ.

        Args:
            ranks: The ranks; None for all that live.
            count: How many collectives.

        Raises:
            UsageError: PyTorch has no record of them.
        """
        return look_at_flight(self._rank_set, ranks, count)

    def logs(self, ranks: Ranks = None, cell: int | CellResult | None = None) -> dict[int, str]:
        """Return everything a cell printed (stdout and stderr), by rank. Warns about what the log could not keep.

        Args:
            cell: Its number in the notebook, or its result; None for the newest that printed.

        Raises:
            UsageError: That cell printed nothing, or the log no longer has it.
        """
        return read_logs(self._rank_set.traffic.read_log, self._rank_set.choose(ranks, living=False), cell)
