"""A call of a function on ranks, as a parcel: with the notebook's cells that its tracebacks will want to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from linecache import getlines
from typing import Any

from nbdist import shells, transfer
from nbdist.errors import TransferError
from nbdist.wire.cells import Reply

_SOURCES_LIMIT = 1 << 20  # characters of cells that go along

Source = tuple[str, int, str]


def pack(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str, cuda: bool = True
) -> transfer.Packed:
    """Make a parcel of a call.

    Args:
        function: What to call. It travels by value, as do its arguments.
        args: Its arguments.
        kwargs: Its arguments by name.
        name: What errors call the function.
        cuda: Whether tensors on GPUs may travel; they arrive on the CPU.

    Raises:
        TransferError: Something can't travel; the text names it.
    """
    call = (function, tuple(args), dict(kwargs), sources(function))
    try:
        return transfer.pack(call, name=f"call of {name}", cuda=cuda)
    except TransferError:
        transfer.check(function, name=f"function {name!r}", cuda=cuda)
        for number, value in enumerate(args):
            transfer.check(value, name=f"args[{number}]", cuda=cuda)
        for keyword, value in kwargs.items():
            transfer.check(value, name=keyword, cuda=cuda)
        raise


def value(reply: Reply) -> Any:
    """What a rank has sent back.

    Raises:
        TransferError: It can't be rebuilt here.
    """
    assert reply.parcel is not None
    return transfer.unpack(reply.parcel)


def value_or_reason(reply: Reply) -> Any:
    """What a rank has sent back, or the reason, if it can't be rebuilt here."""
    try:
        return value(reply)
    except TransferError as error:
        return transfer.Unsent(str(error))


def sources(function: Callable[..., Any]) -> list[Source]:
    """File name, number and text of the notebook's cells, those of the function first, then the newest."""
    numbers = shells.cell_files()
    own = getattr(getattr(function, "__code__", None), "co_filename", "")
    files = sorted(numbers, key=lambda file: (file == own, numbers[file]), reverse=True)
    chosen: list[Source] = []
    room = _SOURCES_LIMIT
    for file in files:
        text = "".join(getlines(file))
        room -= len(text)
        if room < 0:
            break
        chosen.append((file, numbers[file], text))
    return chosen
