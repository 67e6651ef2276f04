"""How little of a Sample travels to the panel's page, and that it is all that the page needs."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import msgspec
import pytest

from nbdist.metrics.node.sample import Sample
from nbdist.panel.figures import TRENDS
from nbdist.panel.model import HEAT_ABOVE, Node, Row, view_of
from nbdist.panel.updates import LIMIT, Updates
from nbdist.wire.pages.panel_messages import (
    NodeRow,
    PanelFrame,
    PanelUpdate,
    RankRow,
)
from testbed.panel_samples import DEAD, gpus, stuck

ENVELOPE = {"method": "custom", "content": None}


class Reader:
    """What a page makes of messages: labextension/src/state.ts, in Python."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = json.loads(json.dumps(state))

    def read(self, update: dict[str, Any]) -> None:
        update = json.loads(json.dumps(update))
        head, stats = self.state["head"], update.get("head", {}).pop("stats", None)
        head |= update.get("head", {})
        if stats is not None:
            head["stats"] = [new or old for old, new in itertools.zip_longest(head["stats"][: len(stats)], stats)]
        for table in ("ranks", "nodes"):
            for index, bits, *values in update.get(table, []):
                columns = [column for column in range(31) if bits >> column & 1]
                for column, value in zip(columns, values, strict=True):
                    self.state[table][index][column] = value
        for metric, first, characters in update.get("levels", []):
            old = self.state["levels"][metric]
            self.state["levels"][metric] = old[:first] + characters + old[first + len(characters) :]


def told(updates: Updates, sample: Sample) -> dict[str, Any]:
    update: dict[str, Any] = msgspec.to_builtins(updates.update(view_of(sample), "live", 1.0))
    return update


def known(sample: Sample) -> dict[str, Any]:
    """What a page knows that opens now."""
    updates = Updates("")
    updates.reset(view_of(sample), "live", 1.0)
    return without_history(updates)


def reader_of(sample: Sample) -> tuple[Updates, Reader]:
    updates = Updates("")
    updates.reset(view_of(sample), "live", 1.0)
    return updates, Reader(without_history(updates))


def without_history(updates: Updates) -> dict[str, Any]:
    state = json.loads(msgspec.json.encode(updates.state()))
    return {key: value for key, value in state.items() if key != "history"}


def test_the_page_knows_everything_after_each_update_of_8_ranks() -> None:
    updates, reader = reader_of(gpus(8))
    for tick in range(1, 30):
        reader.read(told(updates, gpus(8, tick)))
        assert reader.state["ranks"] == known(gpus(8, tick))["ranks"]
        assert reader.state["head"] == known(gpus(8, tick))["head"]


@pytest.mark.parametrize("count", [8, 256])
def test_a_page_is_told_what_its_types_promise(count: int) -> None:
    updates, reader = reader_of(gpus(count))
    for tick in range(1, 4):
        update = told(updates, gpus(count, tick))
        assert msgspec.convert(json.loads(json.dumps(update)), PanelUpdate).ranks
        reader.read(update)
    frame = msgspec.convert(reader.state | {"history": []}, PanelFrame)
    for columns, rows, kind in ((frame.columns, frame.ranks, RankRow), (frame.node_columns, frame.nodes, NodeRow)):
        for values in rows:
            msgspec.convert(dict(zip(columns, values, strict=True)), kind)


@pytest.mark.parametrize("count", [256, 1024])
def test_a_map_catches_up_while_nothing_changes(count: int) -> None:
    updates, reader = reader_of(gpus(count))
    reader.read(told(updates, gpus(count, 3)))
    for _ in range(12):
        reader.read(told(updates, gpus(count, 3)))
    assert reader.state["levels"] == known(gpus(count, 3))["levels"]


def test_of_256_ranks_the_map_is_whole_after_each_update() -> None:
    updates, reader = reader_of(gpus(256))
    for tick in range(1, 9, 2):
        told_first = told(updates, gpus(256, tick))
        reader.read(told_first)
        assert reader.state["levels"]["memory"] == known(gpus(256, tick))["levels"]["memory"]
        reader.read(told(updates, gpus(256, tick)))


@pytest.mark.parametrize("count", [1, 8, HEAT_ABOVE, HEAT_ABOVE + 1, 256, 1024])
def test_no_update_is_larger_than_2_kb(count: int) -> None:
    updates, _ = reader_of(gpus(count))
    chance = random.Random(count)
    for tick in range(12):
        sample = msgspec.to_builtins(gpus(count, 7 * tick))
        for rank in sample["ranks"]:
            rank["doing"] = "ü" * chance.randrange(300)  # two bytes each
        update = told(updates, msgspec.convert(sample, Sample))
        assert len(json.dumps({**ENVELOPE, "content": update}, ensure_ascii=False).encode()) <= LIMIT


def test_every_rank_gets_its_turn_though_all_change_all_the_time() -> None:
    updates, _ = reader_of(gpus(256))
    seen: set[int] = set()
    for tick in range(1, 100):
        seen |= {index for index, *_ in told(updates, gpus(256, 5 * tick)).get("ranks", [])}
    assert seen >= set(range(256)) - {DEAD}


def test_a_rank_that_dies_is_told_at_once() -> None:
    updates, reader = reader_of(gpus(1024))
    sample = msgspec.to_builtins(gpus(1024, 4))
    sample["ranks"][900] |= {"state": "dead", "doing": "exit code 1"}
    for _ in range(2):
        reader.read(told(updates, msgspec.convert(sample, Sample)))
    state = reader.state["columns"].index("state")
    assert reader.state["ranks"][900][state] == "dead"


def test_a_rank_that_has_died_is_told_before_those_that_wait_for_it() -> None:
    updates, reader = reader_of(gpus(1024))
    sample = msgspec.to_builtins(stuck(gpus(1024)))
    sample["ranks"][900] |= {"state": "dead", "doing": "exit code 1"}
    reader.read(told(updates, msgspec.convert(sample, Sample)))
    assert reader.state["ranks"][900][reader.state["columns"].index("doing")] == "exit code 1"


@pytest.mark.parametrize(("count", "updates_needed"), [(256, 1), (1024, 2)])
def test_a_state_that_all_ranks_take_is_told_at_once(count: int, updates_needed: int) -> None:
    updates, reader = reader_of(gpus(count))
    for _ in range(updates_needed):
        reader.read(told(updates, stuck(gpus(count, 3))))
    assert reader.state["levels"]["state"] == known(stuck(gpus(count)))["levels"]["state"]


def test_figures_over_time_have_a_point_every_two_seconds_and_a_gap_where_no_rank_trains() -> None:
    updates, _ = reader_of(gpus(8))
    told(updates, gpus(8, 1))
    assert "point" not in told(updates, gpus(8, 2))
    point = told(updates, gpus(8, 3))["point"]
    assert point[:2] == [1.7e9 + 3, 7] and dict(zip(TRENDS, point[2:], strict=True))["step"] == 0.154
    assert told(updates, stuck(gpus(8, 9)))["point"][3:] == [None] * (len(TRENDS) - 1)
    assert [at for at, *_ in updates.state().trend] == [1.7e9 + 1, 1.7e9 + 3, 1.7e9 + 9]


def test_a_page_that_opens_late_understands_what_comes_next() -> None:
    updates, early = reader_of(gpus(256))
    for tick in range(1, 4):
        early.read(told(updates, gpus(256, tick)))
    late = Reader(msgspec.to_builtins(updates.state()))
    assert late.state["ranks"] == early.state["ranks"] and late.state["levels"] == early.state["levels"]
    for tick in range(4, 9):
        update = told(updates, gpus(256, tick))
        early.read(update)
        late.read(update)
    assert late.state["ranks"] == early.state["ranks"] and late.state["levels"] == early.state["levels"]


def test_other_ranks_need_the_whole_state() -> None:
    updates, _ = reader_of(gpus(8))
    assert updates.fits(view_of(gpus(8, 1)))
    assert not updates.fits(view_of(gpus(4)))


def test_columns_fit_into_the_bits_of_a_javascript_integer() -> None:
    assert len(RankRow.__struct_fields__) <= 31


def test_all_that_the_model_knows_of_a_rank_or_a_machine_is_told() -> None:
    assert RankRow.__struct_fields__ == Row._fields
    assert NodeRow.__struct_fields__ == Node._fields
