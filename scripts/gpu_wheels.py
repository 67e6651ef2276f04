"""The wheels that a machine without a network needs beside torch: which they are, how they come, what is used of them.

A machine's own packages are used where they are new enough; the others are unpacked into a folder, for PYTHONPATH.
Nothing is installed. Standard library only: this runs before any wheel is on the path.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

LARGEST = 60_000_000  # bytes of all wheels
_NOT_NEEDED = ("jupyterlab", "torch")  # the page's own server, and what the machine has
_FOR_TESTS = ("hypothesis>=6.120", "pytest>=9.0")
_OLD_PYTHON = ("exceptiongroup", "tomli", "typing-extensions")  # pip judges "python_version < '3.11'" by its own Python
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def requirements(project: str, python: str) -> list[str]:
    """Return what nbdist and its checks need beside torch and JupyterLab.

    Args:
        project: The text of pyproject.toml.
        python: The version they are for, as "3.12".
    """
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    assert listed is not None, "pyproject.toml has no dependencies"
    needed = [found for found in re.findall(r'^\s*"([^"]+)"', listed[1], re.MULTILINE)]
    more = _OLD_PYTHON if _numbers(python) < (3, 11) else ()
    return [*(each for each in needed if name_of(each) not in _NOT_NEEDED), *_FOR_TESTS, *more]


def pack(root: Path, folder: Path, python: str) -> int:
    """Fill the folder with wheels for Linux on x86-64. Needs a network, once.

    Returns:
        Their size in bytes.

    Raises:
        SystemExit: pip failed, or they are too large to travel.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wanted = requirements((root / "pyproject.toml").read_text(encoding="utf-8"), python)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    if subprocess.run([*command, "--dest", str(folder), *wanted], check=False).returncode:
        raise SystemExit("pip could not download the wheels: see above. `--pack` needs a network")
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > LARGEST:
        raise SystemExit(f"the wheels in {folder} take {size / 1e6:.0f} MB, more than {LARGEST / 1e6:.0f} MB")
    return size


def needed(folder: Path, installed: Callable[[str], str | None]) -> list[Path]:
    """Return the wheels that this machine needs.

    Args:
        folder: The wheels; it need not exist.
        installed: The version of a package that this machine has; None: it has none.
    """
    return [folder / name for name in missing(sorted(wheel.name for wheel in folder.glob("*.whl")), installed)]


def unpack(wheels: Sequence[Path], folder: Path) -> Path:
    """Return the folder in this one that has what these wheels have.

    It appears whole, is never changed, and is used again: several runs may do this at once, and each may go on for as
    long as it likes. Other wheels get another folder.
    """
    contents = hashlib.sha256()
    for path in wheels:
        contents.update(path.read_bytes())
    target = folder / contents.hexdigest()[:16]
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
        new = Path(name) / "site"
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(new)
        try:
            new.rename(target)
        except OSError:
            if not target.exists():  # else another run was faster
                raise
    return target


def missing(wheels: Iterable[str], installed: Callable[[str], str | None]) -> list[str]:
    """Return those wheels whose package is not there, or there in an older version."""
    return [wheel for wheel in wheels if _numbers(installed(wheel.split("-")[0]) or "") < _numbers(wheel.split("-")[1])]


def installed_version(name: str) -> str | None:
    """Return the version of a package that this Python finds; None: it finds none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def name_of(requirement: str) -> str:
    """Return the package that a requirement is of."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def absent(root: Path, search: Sequence[Path], python: str) -> list[str]:
    """Return the packages that are needed and neither installed nor in these folders."""
    wanted = requirements((root / "pyproject.toml").read_text(encoding="utf-8"), python)
    found = {_plain(each.metadata["Name"]) for each in metadata.distributions(path=[*map(str, search), *sys.path])}
    return [name for name in map(name_of, wanted) if _plain(name) not in found]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, to compare: (2, 8, 0) of "2.8.0+cu130"."""
    leading = re.match(r"[\d.]+", version)
    return tuple(int(part) for part in leading[0].strip(".").split(".")) if leading else ()
