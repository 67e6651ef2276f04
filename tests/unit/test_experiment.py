"""Experiments: which names go, what the balance says, in any namespace."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from nbdist.errors import UsageError
from nbdist.metrics.experiment import Balance, Experiment
from nbdist.metrics.node.host import trim_malloc

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_to_reuse() -> None:
    """Give back what earlier tests have freed: a block that fits into it would cost no memory."""
    gc.collect()
    trim_malloc()


def block(mebibytes: int) -> np.ndarray[Any, Any]:
    return np.ones(mebibytes * MIB, dtype=np.uint8)


def quiet(space: dict[str, Any], name: str = "", **options: Any) -> Experiment:
    return Experiment(name, namespace=space, show=None, **options)


def test_names_created_within_are_deleted_but_those_kept() -> None:
    space: dict[str, Any] = {"before": 1}
    with quiet(space, keep=["model"]) as experiment:
        space |= {"model": 1, "scratch": 2, "before": 3}
        experiment.keep("also")
        space["also"] = 4
    assert space == {"before": 3, "model": 1, "also": 4}
    assert experiment.deleted == ["scratch"]


def test_modules_stay() -> None:
    space: dict[str, Any] = {}
    with quiet(space):
        space["np"] = np
    assert space == {"np": np}


def test_what_is_given_back_kept_and_leaked_adds_up_to_what_was_consumed() -> None:
    space: dict[str, Any] = {}
    elsewhere = []
    with quiet(space, keep=["model"]) as experiment:
        space["model"] = block(33)
        space["scratch"] = block(66)
        elsewhere.append(block(40))
    cpu = experiment.data["memory"]["CPU"]
    for figure, expected in {"consumed": 139, "reclaimed": 66, "kept": 33, "leaked": 40}.items():
        assert abs(cpu[figure] - expected * MIB) < 2 * MIB, figure
    del elsewhere


def test_a_cycle_is_given_back() -> None:
    space: dict[str, Any] = {}
    with quiet(space) as experiment:
        ring: list[Any] = [block(50)]
        ring.append(ring)
        space["ring"] = ring
        del ring
    assert experiment.balances["CPU"].leaked < 2 * MIB


def test_what_its_peak_was_is_told() -> None:
    with quiet({}) as experiment:
        block(80)
    assert abs((experiment.balances["CPU"].peaked or 0) - 80 * MIB) < 2 * MIB


def test_begin_and_end_may_stand_in_places_of_their_own() -> None:
    space: dict[str, Any] = {}
    space["e"] = quiet(space).begin()
    space |= {"a": 1, "b": 2}
    space["e"].end(keep=["a"])
    assert set(space) == {"e", "a"}


def test_the_end_of_an_outer_one_ends_those_within() -> None:
    space: dict[str, Any] = {}
    outer = quiet(space, "outer").begin()
    space["a"] = 1
    inner = quiet(space, "inner").begin()
    space["b"] = 2
    outer.end()
    assert (inner.deleted, outer.deleted, space) == (["b"], ["a"], {})


def test_an_inner_one_leaves_the_names_of_the_outer_alone() -> None:
    space: dict[str, Any] = {}
    with quiet(space):
        space["a"] = 1
        with quiet(space):
            space["b"] = 2
        assert space == {"a": 1}
    assert space == {}


def test_one_that_raises_ends_too_and_says_what_may_still_be_held() -> None:
    space: dict[str, Any] = {}
    experiment = quiet(space, "load")
    with pytest.raises(ZeroDivisionError), experiment:
        space["a"] = 1 / 0
    assert "an exception is on its way" in experiment.report


def test_the_report_is_aligned_and_has_units() -> None:
    experiment = quiet({}, "load")
    with experiment:
        pass
    experiment.deleted = ["scratch"]
    experiment.balances = {"CPU": Balance(140 * MIB, 0, 66 * MIB, 33 * MIB)}
    first, *lines = experiment.report.splitlines()
    assert re.fullmatch(r"load: [\d.]+ .?s; deleted scratch", first)
    assert lines == [
        "     consumed  peaked  reclaimed      kept    leaked",
        "CPU  +140 MiB     0 B   66.0 MiB  33.0 MiB  41.0 MiB",
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: quiet({}, "load").end(), "load has not begun"),
        (lambda: quiet({}, keep=["a b"]), "'a b'"),
        (lambda: quiet({}, keep=[3]), "keep=\\['model'\\]"),
        (lambda: quiet({}, keep=3), "keep=\\['model'\\]"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_type(wrong: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wrong()


def test_a_misspelled_name_to_keep_costs_nothing() -> None:
    space: dict[str, Any] = {}
    experiment = quiet(space).begin()
    space["model"] = 1
    with pytest.raises(UsageError, match="no 'modle' to keep, so nothing was deleted"):
        experiment.end(keep=["modle"])
    assert space == {"model": 1}
    experiment.end(keep=["model"])
    assert space == {"model": 1}


def test_nor_does_one_at_the_end_of_a_block() -> None:
    space: dict[str, Any] = {}
    with pytest.raises(UsageError, match="no 'modle' to keep"), quiet(space, keep=["modle"]) as experiment:
        space["model"] = 1
    assert space == {"model": 1}
    assert experiment.data["deleted"] == []


def test_one_ends_and_begins_once() -> None:
    experiment = quiet({}, "load").begin()
    with pytest.raises(UsageError, match="begun before"):
        experiment.begin()
    experiment.end()
    with pytest.raises(UsageError, match="ended already"):
        experiment.end()


def test_in_a_script_it_looks_after_the_names_of_the_module() -> None:
    script = """
        import nbdist
        with nbdist.experiment("load", keep=["a"]):
            a, b = 1, 2
        print("a" in globals(), "b" in globals())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].endswith("deleted b")
    assert done.stdout.splitlines()[-1] == "True False"
