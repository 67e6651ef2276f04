"""Says what of this environment scripts/constraints.txt does not decide, so that the next environment could differ."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).with_name("constraints.txt")
NOT_LOCKED = {"nbdist", "pip", "setuptools", "wheel"}  # ourselves, and what Python's venv brings


def main() -> int:
    """Return the exit code: 1 if anything was found."""
    locked = read_lock(LOCK.read_text())
    found = [problem for name, version in sorted(installed().items()) if (problem := check(name, version, locked))]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


def read_lock(text: str) -> dict[str, Requirement]:
    """The requirement of each package that is locked for this Python."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in requirements if not each.marker or each.marker.evaluate()}


def installed() -> dict[str, str]:
    found = {canonicalize_name(each.metadata["Name"]): each.version for each in distributions()}
    return {name: version for name, version in found.items() if name not in NOT_LOCKED}


def check(name: str, version: str, locked: dict[str, Requirement]) -> str | None:
    if name not in locked:
        return f"{name} {version} is installed, but {LOCK.name} doesn't have it: type scripts/lock --keep"
    if version not in locked[name].specifier:
        return f"{name} {version} is installed, but {LOCK.name} has {locked[name]}: delete .venv and type this again"
    return None


if __name__ == "__main__":
    sys.exit(main())
