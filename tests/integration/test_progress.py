"""Progress bars and widgets of ranks: one bar for all, and widgets that live on a rank but are shown on the page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from testbed.kernel import Execution, Kernel, Outcome, both, lines_by_rank
from tests.support.screen import screen

IMPORTS = "%%distributed\nimport os, sys, time, torch.distributed as dist\nfrom tqdm import tqdm\n"


def models(outcome: Outcome, name: str) -> dict[str, dict[str, Any]]:
    """The state of each widget of a kind, updates applied."""
    found: dict[str, dict[str, Any]] = {}
    for kind, content in outcome.events:
        state = content.get("data", {}).get("state", {})
        if kind == "comm_open" and state["_model_name"] == name:
            found[content["comm_id"]] = dict(state)
        elif kind == "comm_msg" and content["comm_id"] in found:
            found[content["comm_id"]].update(state)
    return found


def send(kernel: Kernel, comm_id: str, data: dict[str, Any]) -> Execution:
    """A message of the page to a widget; what it causes."""
    message = kernel.client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
    kernel.client.shell_channel.send(message)
    return Execution(kernel, message["header"]["msg_id"])


# --- tqdm


def test_the_same_bar_on_all_ranks_is_one_bar(ranks: Kernel) -> None:
    # A bar that begins on one rank when it has ended on another is a second bar.
    outcome = ranks.ok(IMPORTS + "bar = tqdm(range(30))\ndist.barrier()\nfor i in bar: time.sleep(0.01)")
    [line] = screen(outcome.stderr)
    assert line.startswith("[0-1] 100%|") and "30/30" in line


def test_a_bar_is_drawn_while_it_runs_and_not_too_often(ranks: Kernel) -> None:
    began = time.monotonic()
    cell = ranks.start(IMPORTS + "for i in tqdm(range(200), mininterval=0): time.sleep(0.005)")
    cell.wait_until(lambda outcome: "%|" in outcome.stderr, "a bar")
    outcome = cell.finish()
    assert 2 < outcome.stderr.count("%|") < 15 * (time.monotonic() - began) + 3


def test_bars_that_differ_show_the_rank_furthest_behind(ranks: Kernel, tmp_path: Path) -> None:
    cell = ranks.start(
        IMPORTS + "bar = tqdm(total=100)\nbar.update(20 + 30 * rank)\nbar.refresh()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.005)\n"
        "bar.update(80 - 30 * rank)\nbar.close()"
    )
    cell.wait_until(lambda outcome: "(20-50 %)" in outcome.stderr, "the range of both ranks")
    (tmp_path / "go").touch()
    [line] = screen(cell.finish().stderr)
    assert line.startswith("[0-1] 100%|")


def test_a_bar_of_one_rank_is_named(ranks: Kernel) -> None:
    outcome = ranks.ok(IMPORTS + "for i in tqdm(range(3), disable=rank != 0): pass")
    [line] = screen(outcome.stderr)
    assert line.startswith("[0] 100%|")


def test_lines_printed_during_a_bar_stand_above_it(ranks: Kernel) -> None:
    outcome = ranks.ok(
        IMPORTS + "for i in tqdm(range(20)):\n    dist.barrier()\n"
        "    if i % 10 == 0: tqdm.write(f'at {i}', file=sys.stderr)\n    time.sleep(0.01)"
    )
    *above, bar = screen(outcome.stderr)
    assert lines_by_rank("\n".join(above)) == both("at 0", "at 10")
    assert bar.startswith("[0-1] 100%|")


# --- tqdm.notebook


def test_a_notebook_bar_reaches_the_page_for_each_rank(ranks: Kernel) -> None:
    outcome = ranks.ok(IMPORTS + "from tqdm.notebook import tqdm as bars\nfor i in bars(range(10)): time.sleep(0.01)")
    bars = models(outcome, "FloatProgressModel")
    assert [(bar["value"], bar["max"], bar["bar_style"]) for bar in bars.values()] == [(10.0, 10.0, "success")] * 2
    views = "application/vnd.jupyter.widget-view+json"
    boxes = {data[views]["model_id"] for data in outcome.displays if views in data}
    assert boxes == set(models(outcome, "HBoxModel"))
    assert sorted(data["text/plain"] for data in outcome.displays if views not in data) == ["[0]", "[1]"]


# --- ipywidgets


def test_a_widget_of_a_rank_is_shown_and_its_changes_follow(ranks: Kernel) -> None:
    outcome = ranks.ok(
        "%%distributed -r 1\nimport ipywidgets\nslider = ipywidgets.IntSlider(value=3)\n"
        "display(slider)\nslider.value = 5"
    )
    [(model, state)] = models(outcome, "IntSliderModel").items()
    assert state["value"] == 5
    assert outcome.displays[1]["application/vnd.jupyter.widget-view+json"]["model_id"] == model
    later = ranks.ok("%%distributed -r 1\nslider.value = 9;")
    assert ("comm_msg", model, 9) in [
        (kind, content.get("comm_id"), content.get("data", {}).get("state", {}).get("value"))
        for kind, content in later.events
    ]


def test_a_change_on_the_page_reaches_the_widget_of_its_rank(ranks: Kernel) -> None:
    cell = ranks.start(
        "%%distributed\nimport ipywidgets\nslider = ipywidgets.IntSlider(value=3)\n"
        "slider.observe(lambda change: print(f'now {change.new}'), 'value')\nif rank == 0: display(slider)"
    )
    outcome = cell.finish()
    view = next(data for data in outcome.displays if "application/vnd.jupyter.widget-view+json" in data)
    model = view["application/vnd.jupyter.widget-view+json"]["model_id"]
    send(ranks, model, {"method": "update", "state": {"value": 7}, "buffer_paths": []})
    cell.wait_late("[0] now 7\n")
    assert ranks.ok("%%distributed\nslider.value").plain == ["[0] 7\n[1] 3"]


def test_binary_parts_of_widget_messages_arrive_both_ways(ranks: Kernel) -> None:
    cell = ranks.start(
        "%%distributed -r 0\nimport comm\n"
        "channel = comm.create_comm(target_name='bytes', data={'a': 1}, buffers=[b'\\x00\\xff'])\n"
        "channel.on_msg(lambda m: print(m['content']['data'], [bytes(part).hex() for part in m['buffers']]))"
    )
    [opened] = [content for kind, content in cell.finish().events if kind == "comm_open"]
    assert opened["target_name"] == "bytes" and opened["data"] == {"a": 1}
    message = ranks.client.session.msg("comm_msg", {"comm_id": opened["comm_id"], "data": {"b": 2}})
    ranks.client.session.send(ranks.client.shell_channel.socket, message, buffers=[b"\x01\xfe"])
    cell.wait_late("[0] {'b': 2} ['01fe']\n")


def test_a_widget_closed_on_its_rank_is_closed_on_the_page(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed -r 0\nimport ipywidgets\nlabel = ipywidgets.Label('x')\nlabel.close()")
    [model] = models(outcome, "LabelModel")
    assert ("comm_close", model) in [(kind, content.get("comm_id")) for kind, content in outcome.events]


def test_a_widget_of_ranks_that_are_gone_stays_quiet(own_ranks: Kernel) -> None:
    outcome = own_ranks.ok("%%distributed\nimport ipywidgets\ndisplay(ipywidgets.IntSlider())")
    own_ranks.ok("%distributed restart -n 1")
    for model in models(outcome, "IntSliderModel"):
        send(own_ranks, model, {"method": "update", "state": {"value": 7}, "buffer_paths": []})
    assert own_ranks.ok("%%distributed\nprint('well')").stdout == "[0] well\n"
    kept = own_ranks.value("list(__import__('comm').get_comm_manager().comms)")
    assert not set(models(outcome, "IntSliderModel")) & set(kept)
