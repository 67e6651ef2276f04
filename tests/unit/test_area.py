"""One rank's clear_output takes away what is its own, and leaves the others' output where it is."""

from __future__ import annotations

from nbdist.base.ranks import RankNames
from nbdist.client.output.area import Area
from nbdist.client.output.page import Shown, Text
from nbdist.wire.messages.output import Display, ItemKind


def shown(*ranks: int, text: str = "", kind: ItemKind = "display", display_id: str = "") -> Shown:
    return Shown(ranks, Display(ranks[0], 1, kind, {"text/plain": text}, {}, display_id))


def area(*emissions: Text | Shown) -> Area:
    area = Area(range(4))
    for emission in emissions:
        area.add(emission)
    return area


def cleared(area: Area, *ranks: int) -> list[str] | None:
    """What is to be shown again after these ranks' clear_output."""
    area.ask_clear(ranks)
    kept = area.clear()
    if kept is None:
        return None
    return [each.text if isinstance(each, Text) else f"{each.ranks} {each.item.data['text/plain']}" for each in kept]


def test_nothing_is_cleared_that_nobody_asked_for() -> None:
    assert area(shown(0)).clear() is None


def test_all_ranks_together_clear_everything() -> None:
    assert cleared(area(shown(0), Text("stdout", "[0-3] a\n")), 0, 1, 2, 3) == []


def test_ranks_that_ask_one_after_the_other_clear_together() -> None:
    page = area(shown(0), shown(1), shown(2), shown(3))
    page.ask_clear([0, 1])
    assert cleared(page, 2, 3) == []


def test_displays_of_other_ranks_stay() -> None:
    assert cleared(area(shown(0, text="a"), shown(1, 2, text="b")), 0) == ["(1, 2) b"]


def test_what_ranks_share_stays_with_those_who_did_not_clear() -> None:
    page = area(shown(0, 1, text="a"), Text("stdout", "[0-3] b\n[0] c\n[1,3] d\n"))
    assert cleared(page, 0) == ["(1,) a", "[1-3] b\n[1,3] d\n"]
    assert cleared(page, 1) == ["[2-3] b\n[3] d\n"]


def test_text_in_pieces_is_taken_as_whole_lines() -> None:
    page = area(Text("stdout", "[0] a"), Text("stdout", "b\n[1] c"), Text("stdout", "d\n"))
    assert cleared(page, 0) == ["[1] cd\n"]


def test_order_and_streams_of_what_stays_are_kept() -> None:
    page = area(Text("stdout", "[1] a\n"), Text("stderr", "[1] b\n"), shown(1, text="c"), Text("stdout", "[1] d\n"))
    assert cleared(page, 0) == ["[1] a\n", "[1] b\n", "(1,) c", "[1] d\n"]


def test_of_a_bar_its_last_state_stays() -> None:
    assert cleared(area(Text("stderr", "\r[1] 10%\r[1] 20%\r       \r[1] 100%\n")), 0) == ["[1] 100%\n"]


def test_a_display_that_was_updated_stays_as_it_is_now() -> None:
    page = area(shown(1, text="old", display_id="a"), shown(1, text="new", kind="update", display_id="a"))
    assert cleared(page, 0) == ["(1,) new"]


def test_memory_is_bounded() -> None:
    page = Area(range(2))
    for _ in range(100):
        page.add(Text("stdout", "[1] " + "x" * 99_995 + "\n"))
    kept = cleared(page, 0)
    assert kept is not None and 500_000 < sum(map(len, kept)) <= 1_000_000


def test_lines_that_are_kept_name_the_node_if_all_of_its_ranks_are_left() -> None:
    names = RankNames({"node-a": [0], "node-b": [1, 2]})
    area = Area(range(3), names)
    for text in ("[1-2] (node-b) theirs\n", "[0-1] common\n"):
        area.add(Text("stdout", text))
    area.ask_clear([1])
    assert area.clear() == [Text("stdout", "[2] theirs\n[0] (node-a) common\n")]
