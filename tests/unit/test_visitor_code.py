"""Code of a visitor: which names it has, and what is told of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from nbdist.serving.script_frame import names_in
from nbdist.serving.visitor_code import PrintedTexts, VisitorNames, run_code


@pytest.fixture
def names() -> Iterator[VisitorNames]:
    """The main program with one name, and a frame of this file with two."""
    main = vars(sys.modules["__main__"])
    main["shared"], main["hidden"] = "main", "main"
    local, hidden = [1, 2], "frame"
    yield VisitorNames(sys._getframe())
    assert (local, hidden) == ([1, 2], "frame")
    for name in ("shared", "hidden", "made", "f"):
        main.pop(name, None)


def printed(code: str, names: VisitorNames) -> str:
    texts = PrintedTexts()
    failure = run_code(code, names, texts)
    return "".join(text for _, text in texts.texts) + (failure.traceback if failure else "")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("shared, hidden, local", "('main', 'frame', [1, 2])\n"),
        ("[(each, hidden) for each in local if hidden]", "[(1, 'frame'), (2, 'frame')]\n"),
        ("(lambda: local)()", "[1, 2]\n"),
        ("hidden = 'mine'\nhidden", "'mine'\n"),
        ("def f():\n    global made\n    made = 3\nf()\nmade", "3\n"),
        ("import os.path\nlen(local)", "2\n"),
        ("x: int = 1\nx", "1\n"),
        ("'local' in dir(), 'shared' in dir()", "(True, True)\n"),
        ("None", ""),
        ("", ""),
        ("nothing", 'Traceback (most recent call last):\n  File "<look>", line 1, in <module>\n'),
        ("del made", "Traceback"),
    ],
)
def test_code_has_the_names_of_the_frame_and_of_the_main_program(names: VisitorNames, code: str, text: str) -> None:
    assert printed(code, names).startswith(text) and bool(text) == bool(printed(code, names))


def test_names_of_outer_functions_are_there_unless_an_inner_one_has_them_too() -> None:
    step, loss = 7, "outer"

    def helper(loss: str) -> VisitorNames:
        return VisitorNames(sys._getframe())

    assert printed("step, loss", helper("inner")) == "(7, 'inner')\n" and loss == "outer" and step == 7


def test_assignments_stay_in_the_main_program(names: VisitorNames) -> None:
    printed("made = 1\ndef f():\n    global hidden\n    hidden = made + 1", names)
    assert printed("f()\nhidden", names) == "2\n"
    assert {name: vars(sys.modules["__main__"])[name] for name in ("made", "hidden")} == {"made": 1, "hidden": 2}


def test_functions_of_the_code_keep_nothing_of_the_frame_alive(names: VisitorNames) -> None:
    printed("def f():\n    return local", names)
    names.forget_frame()
    assert "NameError: name 'local' is not defined" in printed("f()", names)


def test_only_so_much_is_kept_of_what_code_prints(names: VisitorNames) -> None:
    text = printed("for _ in range(3000): print('x' * 1000)", names)
    assert len(text) < 1.1 * 2**20 and text.endswith("(only the first 1.0 MiB are shown)\n")


def test_reading_a_frame_keeps_nothing_alive() -> None:
    import weakref

    class Thing:
        pass

    def held() -> Iterator[FrameType]:
        thing = Thing()
        things.append(weakref.ref(thing))
        yield sys._getframe()
        del thing
        yield sys._getframe()

    things: list[weakref.ref[Thing]] = []
    frames = held()
    assert "thing" in names_in(next(frames))
    next(frames)
    assert things[0]() is None
