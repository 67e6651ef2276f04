"""Saves that are killed before each of their changes to the disk, one after the other; tells what is found each time.

Called with an empty folder and with what is saved over what: "new" beside an earlier checkpoint, or "same" over it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbdist.train.checkpoint.checkpoint_folder import Draft, find, keep_newest, latest

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")  # and opened files


def save(path: Path, content: str, keep: int | None = None) -> None:
    draft = Draft(path)
    (draft.folder / "content").write_text(content)
    draft.publish({"content": content})
    if keep is not None:
        keep_newest(path.parent, keep)


def killed(change: int, folder: Path, path: Path) -> bool:
    """Whether a save was killed before this change; else it had no more of them."""
    child = os.fork()
    if child == 0:
        sys.addaudithook(_killer(change, str(folder)))
        save(path, "later", keep=1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _killer(change: int, folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _CHANGES or (event == "open" and str(arguments[0]).startswith(folder)):
            count += 1
            if count > change:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def read(path: Path | None) -> str | None:
    return (path / "content").read_text() if path else None


def main(root: str, which: str) -> None:
    found = []
    for change in range(1000):
        folder = Path(root, str(change))
        first = folder / "a"
        save(first, "earlier")
        Path(folder, "mine").mkdir()
        was_killed = killed(change, folder, first if which == "same" else folder / "b")
        seen: dict[str, Any] = {"killed": was_killed, "found": read(find(folder)), "latest": read(latest(folder))}
        if which == "same":
            seen["named"] = read(find(first))
        save(first, "after", keep=1)
        found.append(seen | {"then": sorted(path.name for path in folder.iterdir()), "after": read(find(folder))})
        if not was_killed:
            break
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
