"""Profiles of clusters, by name: `~/.config/nbdist/clusters.toml`.

[big]
engine = "slurm"
nodes = 4
partition = "gpu"
n = 8
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nbdist.base.text import did_you_mean
from nbdist.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # JupyterLab needs it there


def profiles_file() -> Path:
    """Return where they are."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "nbdist" / "clusters.toml"


def profile(name: str) -> dict[str, Any]:
    """Return what a profile sets.

    Raises:
        UsageError: There is none of that name, or the file is not TOML.
    """
    file = profiles_file()
    try:
        known = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {file}, where cluster profiles are: write one with `[{name}]` in its first line and "
            '`engine = "ssh"`, `hosts = ["node-a"]` below, or give `--hosts node-a`'
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} can't be read: {error}") from None
    if not isinstance(found := known.get(name), dict):
        hint = did_you_mean(name, known)
        raise UsageError(f"{file} has no profile {name!r}{hint} Available profiles: {', '.join(known) or 'none'}")
    return found
