"""A package that nbdist needs and that is missing or too old is named in one line, with what to type."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from nbdist.base.requirements import complaint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the packages of this environment, to take some of them away."""
    folder = tmp_path / "site"
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with just these packages."""
    command = [sys.executable, "-S", "-c", code]
    environment = {"PYTHONPATH": f"{site}:{ROOT}", "HOME": str(site.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def remove(site: Path, name: str) -> None:
    for entry in site.glob(f"{name}*"):
        entry.unlink()


def test_this_environment_has_what_nbdist_needs() -> None:
    assert complaint() is None


def test_a_missing_package_is_named_in_place_of_the_import_s_error(site: Path) -> None:
    remove(site, "msgspec")
    last = run(site, "import nbdist; nbdist.Session").stderr.splitlines()[-1]
    assert last == (
        "nbdist.errors.PackageError: nbdist needs msgspec>=0.19 (not installed): "
        "type `%pip install 'msgspec>=0.19'`, then restart the kernel"
    )


def test_a_package_that_is_too_old_is_named_when_the_magics_are_loaded(site: Path) -> None:
    remove(site, "cloudpickle-")
    metadata = site / "cloudpickle-2.2.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: cloudpickle\nVersion: 2.2.1\n")
    outcome = run(site, "from IPython import start_ipython; start_ipython(['-c', '%load_ext nbdist'])")
    assert (
        "nbdist needs cloudpickle>=3.1 (2.2.1 is installed): type `%pip install 'cloudpickle>=3.1'`" in outcome.stdout
    )


def test_an_import_that_fails_for_another_reason_keeps_its_error(site: Path) -> None:
    (site / "msgspec").unlink()
    (site / "msgspec.py").write_text("raise ImportError('a file is broken')")
    assert run(site, "import nbdist; nbdist.Session").stderr.splitlines()[-1] == "ImportError: a file is broken"
