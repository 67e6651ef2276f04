"""What `sync` takes without arguments: everything that has been prepared or registered in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.errors import UsageError
from nbdist.train import state as training
from nbdist.train.state import COUNTERS, State


def prepared_objects(function: str) -> list[Any]:
    """Return what `save_state` would keep of this rank that is the same on all.

    Loaders whose state differs between ranks are not among them.

    Args:
        function: What asks for it.

    Raises:
        UsageError: Nothing is prepared or registered.
    """
    state = training.current()
    if not (state.models or state.optimizers or state.registered):
        raise UsageError(
            f"nothing is prepared on this rank: write nbdist.{function}(model, optimizer). A rank that has replaced "
            "another prepares its model in a setup cell: `%%distributed --setup`"
        )
    loaders = [loader for loader in state.loaders if loader.is_alike_on_ranks]
    scalers = [] if state.scaler is None else [state.scaler]
    kept = [*state.models, *state.optimizers, *state.schedulers, *loaders, *scalers, *state.registered]
    return [*kept, Counters(state)]


def rewind_loaders() -> None:
    """Let loaders go on behind the batches of the last optimizer step, where prepared optimizers count them."""
    state = training.current()
    for loader in state.loaders if state.optimizers else ():
        loader.rewind()


@dataclass
class Counters:
    """What a training counts besides."""

    state: State

    def state_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return {name: getattr(self.state, name) for name in COUNTERS}

    def load_state_dict(self, counts: Mapping[str, int]) -> None:
        """Count on from there."""
        for name in COUNTERS:
            setattr(self.state, name, counts[name])
