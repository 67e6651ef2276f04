"""What a configuration file of another library says, as settings of a plan. Independent of which library it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbdist.errors import UsageError

NO_EQUIVALENT = "no setting of a plan has this effect"


@dataclass
class Reading:
    """What a file says.

    Attributes:
        file: Where it is.
        settings: Of a plan, by name.
        notes: A line for each entry that has no equivalent.
    """

    file: Path
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, name: str, value: object, why: str = NO_EQUIVALENT) -> None:
        """Add a line on an entry, by its last name."""
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        self.notes.append(f"{name.rpartition('.')[2]}: {shown}: {why}")


def switch(name: str, value: object) -> bool:
    """Return whether an entry is on.

    Raises:
        UsageError: It is neither on nor off.
    """
    words = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    if (word := str(value).lower()) in words:
        return words[word]
    raise UsageError(f"{name} must be true or false, not {value!r}")
