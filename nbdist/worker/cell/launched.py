"""What comes of a launched function: its end, and the value to send. The same wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbdist import transfer
from nbdist.errors import TransferError
from nbdist.wire.messages.rank_processes import RankSetup


def call(function: Callable[..., Any], *arguments: object, **keywords: object) -> Any:
    """Call it. `sys.exit()` ends a process well, and so is a return of None here, as in torch's launchers."""
    try:
        return function(*arguments, **keywords)
    except SystemExit as end:
        if is_plain_exit(end):
            return None
        raise


def is_plain_exit(error: BaseException) -> bool:
    """Return whether it is `sys.exit()` or `exit`: a good end."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def pack(value: object, setup: RankSetup) -> transfer.Packed:
    """Pack a rank's return value, or the reason why it can't be sent: its work is done either way."""
    if setup.rank and not setup.options.all_results:
        value = None
    name = f"the value that rank {setup.rank} returned"
    try:
        return transfer.pack(value, name=name)
    except TransferError as error:
        return transfer.pack(transfer.Unsent(str(error)), name=name)
