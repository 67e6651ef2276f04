from __future__ import annotations

import pytest

from nbdist.base import checks
from nbdist.errors import UsageError


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, -1])
def test_only_a_whole_number_that_is_large_enough_will_do(value: object) -> None:
    assert not checks.is_whole(value, 0)
    with pytest.raises(UsageError) as refused:
        checks.check_whole("num_nodes", value, 0, "num_nodes=2")
    assert str(refused.value) == f"num_nodes must be a whole number of 0 or more, not {value!r}: `num_nodes=2`"


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf")])
def test_only_a_finite_number_is_a_number(value: object) -> None:
    assert not checks.is_number(value)


@pytest.mark.parametrize("value", [0, -1, True, "60", float("nan"), 2e9])
def test_a_time_span_is_positive_and_bounded(value: object) -> None:
    with pytest.raises(UsageError) as refused:
        checks.check_seconds("timeout", value)
    assert str(refused.value) == f"timeout must be a number of seconds above 0, not {value!r}: `timeout=60`"


def test_a_time_span_may_be_nothing_where_that_means_something() -> None:
    checks.check_seconds("linger", 0, zero=True)
    checks.check_seconds("timeout", None)
    with pytest.raises(UsageError):
        checks.check_seconds("monitor_interval", None, optional=False)


def test_a_choice_is_refused_with_the_nearest() -> None:
    checks.check_choice("strategy", "ddp", ("ddp", "fsdp"))
    with pytest.raises(UsageError) as refused:
        checks.check_choice("strategy", "FDSP", ("ddp", "fsdp"))
    assert str(refused.value) == "strategy 'FDSP' is unknown: did you mean 'fsdp'? Allowed values: 'ddp', 'fsdp'"


@pytest.mark.parametrize(
    ("value", "default", "on"),
    [
        ("1", False, True),
        ("Yes", False, True),
        ("0", True, False),
        ("OFF", True, False),
        ("", True, True),
        ("", False, False),
        ("neither", True, True),
    ],
)
def test_a_variable_switches_something_on_or_off(
    monkeypatch: pytest.MonkeyPatch, value: str, default: bool, on: bool
) -> None:
    monkeypatch.setenv("NBDIST_SWITCH", value)
    assert checks.is_on("NBDIST_SWITCH", default) is on


def test_a_variable_that_is_not_set_is_as_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBDIST_SWITCH", raising=False)
    assert checks.is_on("NBDIST_SWITCH", default=True)
    assert not checks.is_on("NBDIST_SWITCH")
