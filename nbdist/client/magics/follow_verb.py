"""`%distributed follow`: this notebook shows what a session does that another client drives."""

from __future__ import annotations

import argparse

from nbdist.client.session.following import Following


class FollowVerb:
    """Holds what this notebook follows: one session at a time."""

    def __init__(self) -> None:
        self._following: Following | None = None

    def follow(self, arguments: argparse.Namespace) -> None:
        """Show what a session does, below this cell, instead of what was followed before."""
        if arguments.stop:
            self.stop()
            return
        following = Following(arguments.name)
        self.stop()
        self._following = following
        if arguments.wait:
            following.wait()

    def stop(self) -> None:
        """Follow no longer."""
        if self._following is not None:
            self._following.stop()
        self._following = None

    @property
    def refusal(self) -> str:
        """Why a cell finds no ranks where a session is followed; "" where none is."""
        return self._following.refusal if self._following is not None else ""
