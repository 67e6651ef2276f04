"""What a save tells of the session that it is of: a file beside the checkpoint of its training."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from nbdist.errors import CheckpointError
from nbdist.wire.messages.healing import SetupCell

FORMAT = 1
SESSION_FILE = "session.json"


class LeftOut(msgspec.Struct, frozen=True):
    """A name that could not be saved, or did not come back. why: in words, as "it is a generator"."""

    name: str
    why: str


class NamesOfRank(msgspec.Struct, frozen=True):
    """The names of one rank. kept: those that were saved. prepared: how many things of each role were prepared."""

    kept: list[str]
    left_out: list[LeftOut]
    prepared: dict[str, int]
    size: int = 0


class SavedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it was saved.

    cells: what had run on its ranks, in that order. plan: as JSON. settings: of the start, those that are not of a
    machine. python: the minor version, as functions travel as its bytecode. steps: optimizer steps that were made.
    """

    nbdist: str
    python: str
    saved_at: float
    world_size: int
    cells: list[SetupCell]
    plan: str
    settings: dict[str, str | float | bool | None]
    steps: int = 0
    ranks: list[NamesOfRank] = []
    format: int = FORMAT

    def age(self) -> float:
        """Return how many seconds ago it was saved."""
        return max(time.time() - self.saved_at, 0.0)


def read(folder: Path) -> SavedSession:
    """Return what a save tells of its session.

    Raises:
        CheckpointError: It is damaged, or a newer nbdist has written it.
    """
    try:
        saved = msgspec.json.decode((folder / SESSION_FILE).read_bytes(), type=SavedSession)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{folder / SESSION_FILE} can't be read: {error}") from error
    if saved.format > FORMAT:
        raise CheckpointError(f"{folder} was saved by a newer nbdist ({saved.nbdist}): upgrade nbdist to load it")
    return saved
