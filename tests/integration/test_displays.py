"""Rich displays of ranks: labeled, equal ones once, in their place, updated and cleared as in a local cell."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from nbdist.base.ranks import parse_ranks
from testbed.kernel import Kernel, Outcome, both, lines_by_rank

IMPORTS = "%%distributed\nfrom IPython.display import *\n"


def page(outcome: Outcome) -> list[Any]:
    """What stands below the cell in the end: text as it is, displays as bundles."""
    found: list[Any] = []
    places: dict[str, list[dict[str, Any]]] = {}
    clear = False
    for kind, content in outcome.events:
        if kind == "clear_output":
            clear = content["wait"]
            if not clear:
                found.clear()
        elif kind in ("stream", "display_data"):
            if clear:
                found.clear()
                clear = False
            if kind == "stream" and found and isinstance(found[-1], str):
                found[-1] += content["text"]
            else:
                found.append(content["text"] if kind == "stream" else content["data"])
            if kind == "display_data" and (name := content.get("transient", {}).get("display_id")):
                places.setdefault(name, []).append(content["data"])
        elif kind == "update_display_data":
            for data in places[content["transient"]["display_id"]]:
                data.clear()
                data.update(content["data"])
    return found


def html(outcome: Outcome) -> list[str]:
    """What the page shows as HTML, without styles, and its text."""
    shown = [each if isinstance(each, str) else each.get("text/html", each["text/plain"]) for each in page(outcome)]
    return [each.partition(">")[2].partition("<")[0] if "<span" in each else each for each in shown]


def by_rank(outcome: Outcome) -> dict[int, list[str]]:
    """What each rank shows: its lines, and its displays as HTML, in order."""
    found: dict[int, list[str]] = {0: [], 1: []}
    owners: tuple[int, ...] = ()  # of the display that comes next
    for part in html(outcome):
        if label := re.fullmatch(r"\[([\d,-]+)\]", part):
            owners = parse_ranks(label[1], 2)
            continue
        for rank, shown in ({rank: [part] for rank in owners} or lines_by_rank(part)).items():
            found[rank] += shown
        owners = ()
    return found


# --- results


def test_the_last_values_of_all_ranks_are_one_output(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nrank * 10")
    assert outcome.displays == [{"text/plain": "[0] 0\n[1] 10"}]


def test_equal_last_values_are_shown_once(ranks: Kernel) -> None:
    assert ranks.ok("%%distributed\n'same'").plain == ["[0-1] 'same'"]


def test_a_last_value_of_several_lines_is_named_on_each(ranks: Kernel) -> None:
    assert ranks.ok("%%distributed -r 1\nimport numpy\nnumpy.eye(2)").plain == [
        "[1] array([[1., 0.],\n[1]        [0., 1.]])"
    ]


def test_a_last_value_that_comes_late_is_added_to_the_others(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nimport time\ntime.sleep(0.4 * rank)\nrank")
    assert outcome.plain == ["[0] 0\n[1] 1"]


def test_no_value_shows_nothing(ranks: Kernel) -> None:
    assert ranks.ok("%%distributed\nNone").displays == []


# --- rich displays


def test_a_dataframe_of_each_rank_is_shown_as_html_below_its_label(ranks: Kernel) -> None:
    outcome = ranks.ok("%%distributed\nimport pandas\npandas.DataFrame({'rank': [rank]})")
    shown = page(outcome)
    tables = {label["text/plain"]: table for label, table in zip(shown[::2], shown[1::2], strict=True)}
    assert {label: table["text/plain"] for label, table in tables.items()} == {
        "[0]": "   rank\n0     0",
        "[1]": "   rank\n0     1",
    }
    assert all("<table" in table["text/html"] for table in tables.values())


def test_equal_displays_are_shown_once_with_all_their_ranks(ranks: Kernel) -> None:
    outcome = ranks.ok(
        IMPORTS + "import torch.distributed as dist\n"
        "for i in range(20):\n    dist.barrier()\n    display(HTML(f'<b>{i}</b>'))"
    )
    assert by_rank(outcome) == both(*(f"<b>{i}</b>" for i in range(20)))
    assert "[0-1]" in html(outcome)  # a busy machine may part some of them


def test_a_display_is_the_bundle_that_the_rank_made(ranks: Kernel) -> None:
    outcome = ranks.ok(IMPORTS + "display({'text/plain': 'p', 'application/json': {'a': [1]}}, raw=True)")
    assert page(outcome)[1] == {"text/plain": "p", "application/json": {"a": [1]}}


@pytest.mark.parametrize("end", ["plt.show()", ""])
def test_a_figure_is_shown_as_an_image(ranks: Kernel, end: str) -> None:
    outcome = ranks.ok(f"%%distributed -r 1\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, 3]);\n{end}", 120)
    [image] = [each["image/png"] for each in page(outcome) if "image/png" in each]
    assert base64.b64decode(image).startswith(b"\x89PNG")


def test_text_and_displays_of_a_rank_keep_their_order(ranks: Kernel) -> None:
    outcome = ranks.ok(
        IMPORTS + "for i in range(5):\n    print('text', i)\n    display(HTML(f'<b>{i}</b>'))\nprint('end')"
    )
    expected = [each for i in range(5) for each in (f"text {i}", f"<b>{i}</b>")]
    assert by_rank(outcome) == both(*expected, "end")


def test_a_large_display_arrives_in_its_place(ranks: Kernel) -> None:
    outcome = ranks.ok(IMPORTS + "print('before')\ndisplay(HTML('x' * 3_000_000))\nprint('after')")
    for shown in by_rank(outcome).values():
        assert [len(each) for each in shown] == [len("before"), 3_000_000, len("after")]


def test_displays_of_a_thread_arrive(ranks: Kernel) -> None:
    code = "import threading\nt = threading.Thread(target=display, args=(HTML('<i>t</i>'),))\nt.start()\nt.join()"
    assert by_rank(ranks.ok(IMPORTS + code)) == both("<i>t</i>")


def test_displays_of_a_background_cell_appear_below_it_while_another_runs(ranks: Kernel, tmp_path: Path) -> None:
    wait = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.005)\n"
    background = ranks.start(
        "%%distributed --background -r 0\nfrom IPython.display import HTML\n"
        + wait.format(str(tmp_path / "a"))
        + "display(HTML('<b>behind</b>'))\nprint('shown')"
    )
    background.finish()
    other = ranks.start("%%distributed -r 1\nprint('here')\n" + wait.format(str(tmp_path / "b")))
    other.wait_for("here")
    (tmp_path / "a").touch()
    background.wait_late("[0] shown\n")
    (tmp_path / "b").touch()
    assert other.finish().displays == []
    assert html(background.outcome)[-3:] == ["[0]", "<b>behind</b>", "[0] shown\n"]


# --- updates


def test_a_handle_updates_the_display_of_its_own_rank(ranks: Kernel) -> None:
    outcome = ranks.ok(
        IMPORTS + "handle = display(HTML(f'old {rank}'), display_id=True)\nhandle.update(HTML(f'new {rank}'))"
    )
    assert sorted(html(outcome)) == ["[0]", "[1]", "new 0", "new 1"]


def test_update_display_finds_a_display_by_its_name(ranks: Kernel) -> None:
    outcome = ranks.ok(IMPORTS + "display('old', display_id='mine')\nupdate_display(f'new {rank}', display_id='mine')")
    assert sorted(html(outcome)) == ["[0] 'new 0'", "[1] 'new 1'"]


def test_a_later_cell_updates_a_display_of_an_earlier_one(ranks: Kernel) -> None:
    first = ranks.ok(IMPORTS + "handle = display(HTML('old'), display_id=True);")
    second = ranks.ok("%%distributed\nhandle.update(HTML(f'new {rank}'))")
    first.events += second.events
    assert sorted(html(first)) == ["[0]", "[1]", "new 0", "new 1"]


# --- clear_output


def test_a_loop_of_clear_and_display_leaves_the_last_of_each_rank(ranks: Kernel) -> None:
    outcome = ranks.ok(
        IMPORTS + "import time\nfor i in range(10):\n    clear_output(wait=True)\n    display(HTML(f'{rank}: {i}'))\n"
        "    print('step', i)\n    time.sleep(0.03 * rank)"
    )
    assert by_rank(outcome) == {rank: [f"{rank}: 9", "step 9"] for rank in (0, 1)}


def test_all_ranks_together_clear_everything(ranks: Kernel) -> None:
    assert by_rank(ranks.ok(IMPORTS + "print('before', rank)\nclear_output()\nprint('after')")) == both("after")


def test_a_rank_clears_only_what_is_its_own(ranks: Kernel) -> None:
    outcome = ranks.ok(
        IMPORTS + "import torch.distributed as dist\nprint('common')\ndisplay(HTML(f'of {rank}'))\ndist.barrier()\n"
        "if rank == 0:\n    clear_output()\n    print('after')"
    )
    assert by_rank(outcome) == {0: ["after"], 1: ["common", "of 1"]}


def test_waiting_to_clear_clears_nothing_until_something_comes(ranks: Kernel) -> None:
    assert by_rank(ranks.ok(IMPORTS + "print('stays')\nclear_output(wait=True)")) == both("stays")


def test_last_values_stay_when_a_slower_rank_clears_its_own(ranks: Kernel) -> None:
    outcome = ranks.ok(
        IMPORTS + "import time\nif rank == 1:\n    print('old')\n    time.sleep(0.5)\n"
        "    clear_output()\n    print('new')\nrank"
    )
    shown = html(outcome)
    assert shown[-1] == "[0] 0\n[1] 1" or shown[0] == "[0] 0\n[1] 1"
    assert "[1] new\n" in shown and "[1] old\n" not in shown


# --- displays that do not arrive

# What a defect on a rank could send in place of a display: a frame that says which display it is, or none of ours.
UNREADABLE = {
    "a display with wrong types": "msgspec.msgpack.encode(['Display', 0, message.sequence, 'display', {}, {1: 2}])",
    "nonsense": "b'\\xc1'",
}


@pytest.mark.parametrize("frame", UNREADABLE)
def test_a_display_that_cannot_be_read_is_reported_and_holds_up_nothing(ranks: Kernel, frame: str) -> None:
    outcome = ranks.ok(
        f"{IMPORTS.replace('%%distributed', '%%distributed -r 0')}"
        "import msgspec, nbdist.worker.lanes.display_lane as lane\n"
        "encode = lane.encode\n"
        f"lane.encode = lambda message: {UNREADABLE[frame]}\n"
        "try:\n    print('above'); display(HTML('lost')); display(HTML('lost too'))\n"
        "finally: lane.encode = encode\n"
        "print('below')"
    )
    assert outcome.stdout == "[0] above\n[0] below\n"
    assert outcome.stderr.count("rank 0 displayed something that is missing here") == 1
    assert html(ranks.ok("%%rank 0\ndisplay(HTML('next'))"))[-1] == "next"


def test_a_message_that_cannot_be_read_is_reported_once(own_ranks: Kernel) -> None:
    code = (
        "%%distributed -r 0\nimport nbdist.worker.lanes.display_lane as lane\nencode = lane.encode\n"
        "lane.encode = lambda message: b'\\xc1'\n"
        "try: get_ipython().display_pub.clear_output()\nfinally: lane.encode = encode"
    )
    assert "a message from rank 0 could not be handled" in own_ranks.ok(code).stderr
    assert "a message from rank 0" not in own_ranks.ok(code).stderr
