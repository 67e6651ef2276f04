"""Tables of which function handles which type of message."""

from __future__ import annotations

from nbdist.wire.base.message import Handlers


class Opened:
    pass


class Closed:
    pass


def test_a_message_goes_to_the_handler_of_its_type() -> None:
    handled: list[tuple[object, int]] = []
    handlers = Handlers[[int]]().on(Opened, lambda message, rank: handled.append((message, rank)))
    message = Opened()
    assert handlers(message, 3)
    assert handled == [(message, 3)]


def test_a_message_of_another_type_is_left_to_the_caller() -> None:
    handlers = Handlers[[]]().on(Opened, lambda message: None)
    assert not handlers(Closed())
