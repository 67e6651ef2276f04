"""Whether the packages that nbdist needs are installed and new enough, from their metadata: none is imported."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from nbdist.errors import PackageError

_AT_LEAST = re.compile(r"([\w.-]+)>=([\w.]+)$")  # what pyproject.toml has; those of extras go on with a marker


def complaint() -> str | None:
    """Return one line that names the packages that are missing or too old, and what to type; None if all is well."""
    unmet = dict(_unmet())
    if not unmet:
        return None
    named = ", ".join(f"{requirement} ({found})" for requirement, found in unmet.items())
    wanted = " ".join(f"'{requirement}'" for requirement in unmet)
    return f"nbdist needs {named}: type `%pip install {wanted}`, then restart the kernel"


def explained(error: ImportError) -> ImportError:
    """Return what to raise in place of an import's error: one line if a package is missing or too old."""
    text = complaint()
    return error if text is None else PackageError(text)


def _unmet() -> Iterator[tuple[str, str]]:
    """Yield what is not as required, and what is there instead."""
    for requirement in _requirements():
        if (match := _AT_LEAST.match(requirement)) is None:
            continue
        name, least = match.groups()
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield requirement, "not installed"
            continue
        if _numbers(found) < _numbers(least):
            yield requirement, f"{found} is installed"


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("nbdist") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from its source, uninstalled
        return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.split(r"[a-z+]", version)[0])))
