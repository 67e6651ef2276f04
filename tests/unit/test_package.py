"""What people get when they install nbdist and import it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import nbdist
from nbdist import errors
from nbdist.client.magic_lines.parsers import verb_parsers

PUBLIC: list[str] = vars(nbdist)["__getattr__"]("__all__")
ROOT = Path(__file__).resolve().parents[2]


def test_import_loads_neither_torch_nor_ipywidgets() -> None:
    program = "import sys, nbdist; print(*sorted({'torch', 'ipywidgets'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_all_is_sorted() -> None:
    assert list(PUBLIC) == sorted(PUBLIC)


def test_every_name_in_all_can_be_had() -> None:
    assert [name for name in PUBLIC if not hasattr(nbdist, name)] == []


@pytest.mark.parametrize(
    "name", ["cuda_guard.report", "metrics.flops.count", "metrics.memory.MemoryMeter", "metrics.steps.StepMeter"]
)
def test_modules_in_the_reference_can_be_had_from_nbdist_alone(name: str) -> None:
    program = f"import nbdist; print(callable(nbdist.{name}))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


def test_tab_finds_every_name_before_it_is_loaded() -> None:
    program = "import nbdist; print(*set(nbdist.__all__) - set(dir(nbdist)))"
    missing = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert missing.stdout.split() == []


def test_every_name_in_all_is_in_the_reference() -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs" / "reference.md").read_text()))
    assert set(PUBLIC) - words == set()


def test_what_tab_offers_on_a_session_is_what_the_reference_has() -> None:
    rows = (ROOT / "docs" / "reference.md").read_text().splitlines()
    [row] = [row for row in rows if row.startswith("| `Session(4)` |")]
    assert {name for name in dir(nbdist.Session) if not name.startswith("_")} == set(re.findall(r"`\.(\w+)", row))


def test_every_verb_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert [verb for verb in verb_parsers() if f"`%distributed {verb}" not in text] == []


def test_every_error_is_in_all() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.NbdistError)
    }
    assert tree - set(PUBLIC) == set()


def test_version_is_that_of_the_installed_package() -> None:
    assert nbdist.__version__ == metadata.version("nbdist")


def test_wheel_carries_types_license_and_what_pages_load_but_no_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"nbdist/py.typed", "nbdist/__init__.pyi"} <= set(names)
    assert {"nbdist/panel/static/widget.js", "nbdist/panel/static/widget.css"} <= set(names)
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
    version = nbdist.__version__
    extension = f"nbdist-{version}.data/data/share/jupyter/labextensions/nbdist"
    package = json.loads((ROOT / "labextension" / "prebuilt" / "nbdist" / "package.json").read_text())
    assert package["version"] == version
    assert {f"{extension}/package.json", f"{extension}/{package['jupyterlab']['_build']['load']}"} <= set(names)
    assert f"nbdist-{version}.data/data/etc/jupyter/jupyter_server_config.d/nbdist.json" in names
    folders = {"nbdist", f"nbdist-{version}.dist-info", f"nbdist-{version}.data"}
    assert {name.split("/")[0] for name in names} == folders
