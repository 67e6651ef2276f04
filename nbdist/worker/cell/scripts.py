"""What `%run` of one script leaves for `%run` of the next: each finds the modules beside itself, as under torchrun.

Owns which folders had scripts. Independent of shells.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


class ScriptFolders:
    """The folders from which scripts have run in this process."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()

    def enter(self, script: Path) -> None:
        """Forget modules that scripts of other folders have imported, where this one has its own of the same name.

        All others stay, so that classes in them still pickle.

        Args:
            script: The script that is about to run.
        """
        folder = script.resolve().parent
        others = self._folders - {folder}
        self._folders.add(folder)
        if not others or not folder.is_dir():
            return
        taken = {name for name in _modules_in(folder) if _folder_of(sys.modules.get(name)) in others}
        for name in [name for name in sys.modules if name.partition(".")[0] in taken]:
            del sys.modules[name]


def _modules_in(folder: Path) -> Iterator[str]:
    """Yield the names that can be imported from a folder; a folder without `__init__.py` is a package, too."""
    for path in folder.iterdir():
        if path.suffix == ".py" or path.is_dir():
            yield path.stem


def _folder_of(module: ModuleType | None) -> Path | None:
    """Return the folder that has to be on `sys.path` for a top-level module to be found there."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return Path(places[0]).resolve().parent if places[0] else None
