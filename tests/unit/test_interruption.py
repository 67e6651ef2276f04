"""Who gets a Ctrl-C: what waits for events, the end of a section that must not be interrupted, or whoever asks."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from nbdist.client.base import interruption


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_deferred_ctrl_c_is_raised_at_the_end() -> None:
    passed = []
    with pytest.raises(KeyboardInterrupt, match="interrupted"), interruption.deferred():
        ctrl_c()
        passed.append("body")
    assert passed == ["body"]


def test_in_a_deferral_within_another_one_the_end_of_the_outer_is_meant() -> None:
    passed = []
    with pytest.raises(KeyboardInterrupt), interruption.deferred():
        with interruption.deferred():
            ctrl_c()
        passed.append("inner")
    assert passed == ["inner"]


def test_events_get_what_was_deferred_before_and_what_comes_in_their_body() -> None:
    heard: list[Any] = []
    with interruption.deferred():
        ctrl_c()
        with interruption.events(heard.append):
            assert heard == [KeyboardInterrupt]
            ctrl_c()
    assert heard == [KeyboardInterrupt] * 2


def test_after_the_events_a_ctrl_c_is_deferred_again() -> None:
    heard: list[Any] = []
    with pytest.raises(KeyboardInterrupt), interruption.deferred():
        with interruption.events(heard.append):
            pass
        ctrl_c()
    assert heard == []


def test_a_deferral_within_events_raises_at_its_own_end() -> None:
    heard: list[Any] = []
    with interruption.deferred(), interruption.events(heard.append):
        with pytest.raises(KeyboardInterrupt), interruption.deferred():
            ctrl_c()
        ctrl_c()
    assert heard == [KeyboardInterrupt]


def test_events_within_events_are_the_ones_that_hear() -> None:
    outer: list[Any] = []
    inner: list[Any] = []
    with interruption.deferred(), interruption.events(outer.append):
        with interruption.events(inner.append):
            ctrl_c()
        ctrl_c()
    assert (outer, inner) == ([KeyboardInterrupt], [KeyboardInterrupt])


def test_where_the_user_is_waited_for_it_is_raised_at_once_and_goes_to_the_events_again_afterwards() -> None:
    heard: list[Any] = []
    with interruption.deferred(), interruption.events(heard.append):
        with pytest.raises(KeyboardInterrupt), interruption.raised():
            ctrl_c()
        ctrl_c()
    assert heard == [KeyboardInterrupt]


def test_the_handler_of_before_is_there_again_at_the_end() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruption.deferred(), interruption.events(lambda event: None):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
