"""A function call on ranks, packed with the notebook cells that its tracebacks will show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from linecache import getlines
from typing import Any

from nbdist import shells, transfer
from nbdist.errors import TransferError
from nbdist.wire.messages.cells import Reply

_SOURCES_LIMIT = 1 << 20  # characters of cells that are included

Source = tuple[str, int, str]


def pack(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str, cuda: bool = True
) -> transfer.Packed:
    """Pack a call.

    Args:
        function: The function. It is sent by value, as are its arguments.
        args: Its arguments.
        kwargs: Its keyword arguments.
        name: The function's name in errors.
        cuda: Whether tensors on GPUs may be sent; they arrive on the CPU.

    Raises:
        TransferError: Something can't be sent; the text names it.
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
    """Return what a rank has sent back.

    Raises:
        TransferError: It can't be rebuilt here.
    """
    assert reply.parcel is not None
    return transfer.unpack(reply.parcel)


def value_or_reason(reply: Reply) -> Any:
    """Return what a rank has sent back, or the reason why it can't be rebuilt here."""
    try:
        return value(reply)
    except TransferError as error:
        return transfer.Unsent(str(error))


def sources(function: Callable[..., Any]) -> list[Source]:
    """Return file name, number and text of the notebook's cells: the function's first, then the newest."""
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
