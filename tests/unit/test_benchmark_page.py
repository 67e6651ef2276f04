"""How scripts/bench --write keeps results in docs/performance.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ["death", "lines", "start"]
PAGE = "# Performance\n\nWords.\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_benchmarks", ROOT / "scripts" / "run_benchmarks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_results_of_a_run_stand_below_what_they_were_measured_on(script: ModuleType) -> None:
    page = script.written(PAGE, {"start": ["2 s"], "death": ["1 s", "3 s"]}, "Measured here.", KNOWN)
    assert page == (
        f"{PAGE}\n{script.BEGIN}\n\nMeasured here.\n\n"
        f"### death\n\n```text\n1 s\n3 s\n```\n\n### start\n\n```text\n2 s\n```\n\n{script.END}\n"
    )


def test_a_run_of_one_keeps_the_results_of_the_others(script: ModuleType) -> None:
    page = script.written(PAGE, {"start": ["2 s"], "death": ["1 s"]}, "Measured here.", KNOWN)
    page = script.written(page, {"lines": ["5 s"], "start": ["3 s"]}, "Measured here.", KNOWN)
    assert script.blocks_in(page.partition(script.BEGIN)[2]) == {
        name: ("Measured here.", text) for name, text in (("death", "1 s"), ("lines", "5 s"), ("start", "3 s"))
    }
    assert page.count("Measured here.") == 1


def test_what_was_measured_elsewhere_says_so_itself(script: ModuleType) -> None:
    page = script.written(PAGE, {"start": ["2 s"], "death": ["1 s"]}, "Measured here.", KNOWN)
    page = script.written(page, {"lines": ["5 s"]}, "Measured there.", KNOWN)
    assert "### lines\n\nMeasured there.\n\n```text\n" in page and page.count("Measured here.") == 1
    page = script.written(page, {"start": ["6 s"], "death": ["7 s"]}, "Measured there.", KNOWN)
    assert "Measured here." not in page and page.count("Measured there.") == 1


def test_a_benchmark_that_is_no_more_leaves_the_page(script: ModuleType) -> None:
    page = script.written(PAGE, {"start": ["2 s"], "old": ["1 s"]}, "Measured here.", [*KNOWN, "old"])
    assert "### old" not in script.written(page, {"start": ["2 s"]}, "Measured here.", KNOWN)


def test_writing_the_page_that_there_is_changes_nothing_in_it(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    blocks = script.blocks_in(page.partition(script.BEGIN)[2].partition(script.END)[0])
    for name, (where, lines) in blocks.items():
        assert script.written(page, {name: lines.split("\n")}, where, blocks) == page
