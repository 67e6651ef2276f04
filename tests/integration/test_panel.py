"""The panel in a real kernel: what reaches the page while cells run, what stays in the notebook, what buttons do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from nbconvert import HTMLExporter

from nbdist.panel.updates import LIMIT
from testbed.kernel import LIMIT as PATIENCE
from testbed.kernel import Kernel, Outcome

ROOT = Path(__file__).resolve().parents[2]
WIDGET = "application/vnd.jupyter.widget-view+json"
SAMPLES = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom testbed.panel_samples import Source, gpus\nimport nbdist\n"
)


@pytest.fixture
def panel_kernel(ranks: Kernel) -> Iterator[Kernel]:
    """A kernel that shows a panel of eight GPUs, as `panel`."""
    ranks.ok(f"{SAMPLES}source = Source(); panel = nbdist.Panel(source=source); source.show(gpus(8)); panel")
    yield ranks
    ranks.ok("panel.close()")


@pytest.fixture
def panel_of_ranks(ranks: Kernel) -> Iterator[Kernel]:
    """A kernel that shows a panel of its two ranks, as `panel`."""
    ranks.ok("import nbdist; panel = nbdist.Panel(nbdist.get_session(), rate=0.25); panel")
    yield ranks
    ranks.ok("panel.close()")


def widget_messages(outcome: Outcome) -> list[dict[str, Any]]:
    """What went to the page by the widget's way."""
    return [content["data"] for kind, content in outcome.events if kind == "comm_msg"]


def updates(outcome: Outcome) -> list[dict[str, Any]]:
    return [data for data in widget_messages(outcome) if data["method"] == "custom"]


def press(kernel: Kernel, type_: str, value: object) -> list[dict[str, Any]]:
    """What a page sends when its reader does something. Returns what comes back."""
    wish = {"method": "custom", "content": {"type": type_, "value": value}}
    return send(kernel, "comm_msg", {"comm_id": kernel.value("panel.model_id"), "data": wish})


def send(kernel: Kernel, type_: str, content: dict[str, Any], *, at_once: bool = False) -> list[dict[str, Any]]:
    """Send a message as a page does, perhaps by the channel that is heard at once. Returns what comes back by comms."""
    message = kernel.client.session.msg(type_, content)
    (kernel.client.control_channel if at_once else kernel.client.shell_channel).send(message)
    found = []
    while True:
        answer = kernel.client.get_iopub_msg(timeout=PATIENCE)
        if answer["parent_header"].get("msg_id") not in (message["header"]["msg_id"], None):
            continue
        if answer["msg_type"] == "comm_msg":
            data = answer["content"]["data"]
            found.append(data["content"] if data.get("method") == "custom" else data)
        if answer["content"].get("execution_state") == "idle":
            return found


# --- what is looked at


def test_before_start_it_shows_the_notebooks_own_process(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    text = kernel.ok("%distributed panel --text").stdout
    assert text.startswith("this notebook's process")
    assert re.search(r"^notebook +cpu +\[.*\] +[\d.]+ MiB of [\d.,]+ [GT]iB +\d+ % +● busy$", text, re.MULTILINE)


def test_it_follows_the_notebook_from_session_to_session(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\n%distributed panel")
    kernel.ok("%distributed start -n 2")
    assert kernel.ok("%distributed panel --text").stdout.startswith("2 ranks")
    kernel.ok("%distributed stop")
    kernel.ok("%distributed start -n 3")
    assert kernel.ok("%distributed panel --text").stdout.startswith("3 ranks")


def test_a_session_that_has_ended_leaves_its_last_values(own_ranks: Kernel) -> None:
    own_ranks.ok("%distributed panel")
    ended = own_ranks.ok("%distributed stop")
    assert updates(ended)[-1]["content"]["head"]["live"] == "ended"
    assert own_ranks.ok("%distributed panel --text").stdout.startswith("2 ranks: all idle · session ended · ")


def test_the_end_is_said_in_the_cell_that_brings_it(own_ranks: Kernel) -> None:
    own_ranks.ok("import nbdist; panel = nbdist.Panel(); panel")
    assert "2 ranks: all idle · session ended" in own_ranks.ok("nbdist.get_session().close(); print(panel.text)").stdout


def test_a_rate_once_chosen_holds_for_the_next_session(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\n%distributed panel --rate 0.25")
    kernel.ok("%distributed start -n 2\nimport nbdist")
    assert kernel.value("nbdist.client.costs.monitor.Monitor.of(nbdist.get_session()).rate") == 0.25


def test_a_panel_that_rests_when_its_session_ends_can_go_on_with_the_next(own_ranks: Kernel) -> None:
    own_ranks.ok("import nbdist; panel = nbdist.Panel(); panel")
    press(own_ranks, "pause", True)
    own_ranks.ok("%distributed stop")
    begun = own_ranks.ok("%distributed start -n 3")
    assert updates(begun)[-1]["content"]["head"]["live"] == "paused"
    press(own_ranks, "pause", False)
    assert own_ranks.value("panel.text").startswith("3 ranks: all idle")


@pytest.mark.torch_private
def test_a_rank_that_waits_for_another_is_stuck_until_it_goes_on(ranks: Kernel, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    ranks.ok("import nbdist; panel = nbdist.Panel(rate=0.25); panel")
    ranks.ok("%%distributed\nimport time, os, torch, torch.distributed as dist")
    wait = f"%%distributed --background\nif rank == 0:\n    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    ranks.ok(wait + "dist.all_reduce(torch.ones(1))\nwhile not os.path.exists('" + str(gate) + "2'): time.sleep(0.01)")
    until = "import time\nwhile {} ('1 stuck' in panel.text): time.sleep(0.05)\nprint(panel.text)"
    stuck = ranks.ok(until.format("not")).stdout
    assert stuck.startswith("2 ranks: 1 busy, 1 stuck")
    assert re.search(r"^1 .* ◐ stuck +waits in all_reduce, cell \d+ line 4, for rank 0$", stuck, re.MULTILINE)
    gate.touch()
    assert ranks.ok(until.format("")).stdout.startswith("2 ranks: all busy")
    gate.with_name("open2").touch()
    ranks.ok("panel.close()")


def test_a_session_of_ones_own_can_be_shown(panel_of_ranks: Kernel) -> None:
    assert panel_of_ranks.value("panel.text").startswith("2 ranks: all idle")


# --- live


def test_numbers_reach_the_page_while_a_cell_runs(panel_of_ranks: Kernel) -> None:
    running = panel_of_ranks.start(
        "%%distributed\nimport torch\nkept = torch.ones(64 << 18)\nprint('held')\nimport time; time.sleep(60)"
    )
    running.wait_for("held")
    figure = re.compile(r'"memory, min / mean / max", "6[4-9]\.\d / ')
    running.wait_until(lambda outcome: bool(figure.search(json.dumps(updates(outcome)))), "64 MiB on the page")
    panel_of_ranks.interrupt()
    running.finish()


def test_an_update_is_at_most_2_kb_on_the_wire(panel_kernel: Kernel) -> None:
    outcome = panel_kernel.ok("for tick in range(1, 20): source.show(gpus(8, tick))")
    sizes = [len(json.dumps(update, ensure_ascii=False).encode()) for update in updates(outcome)]
    assert len(sizes) == 19 and max(sizes) <= LIMIT


def test_a_panel_that_fails_says_so_and_does_no_harm(panel_kernel: Kernel) -> None:
    outcome = panel_kernel.ok("source.show(gpus); print('the loop goes on')")
    assert "the loop goes on" in outcome.stdout and outcome.stderr == ""
    assert "the panel has stopped" in json.dumps(updates(outcome))


def test_what_was_seen_can_be_drawn(panel_of_ranks: Kernel) -> None:
    (shown,) = panel_of_ranks.ok("%matplotlib inline\npanel.plot()").displays
    assert shown["image/png"]


# --- what stays


def test_a_copy_without_javascript_stands_above_the_living_view(panel_kernel: Kernel) -> None:
    copy, living = panel_kernel.ok("panel").displays
    assert "78.1 of 79.6 GiB" in copy["text/plain"] and "78.1 of 79.6 GiB" in copy["text/html"]
    assert WIDGET not in copy and living[WIDGET]["model_id"] == panel_kernel.value("panel.model_id")


def test_the_copy_is_brought_up_to_date_when_a_cell_ends(panel_kernel: Kernel) -> None:
    outcome = panel_kernel.ok("source.show(gpus(4))")
    (copy,) = [content["data"] for kind, content in outcome.events if kind == "update_display_data"]
    assert copy["text/plain"].startswith("4 ranks")


def test_a_cell_that_changes_nothing_sends_nothing(panel_kernel: Kernel) -> None:
    assert [kind for kind, _ in panel_kernel.ok("1").events if "comm" in kind or "display" in kind] == []


def test_an_exported_notebook_has_the_last_values(tmp_path: Path) -> None:
    new = nbformat.v4
    cells = [f"{SAMPLES}source = Source(); panel = nbdist.Panel(source=source); panel", "source.show(gpus(8))"]
    notebook = new.new_notebook(cells=[new.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", store_widget_state=False).execute()
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert "78.1 of 79.6 GiB" in page and "model not found" not in page


def test_a_terminal_gets_a_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor", "-c"]
    shown = subprocess.run(
        [*command, "%load_ext nbdist\n%distributed panel"], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.startswith("this notebook's process") and "<" not in shown.stdout
    assert shown.stderr == ""


# --- what the page asks


def test_pause_and_resume(panel_kernel: Kernel) -> None:
    (answer,) = press(panel_kernel, "pause", True)
    assert answer["head"]["live"] == "paused" and not panel_kernel.value("source.watched")
    press(panel_kernel, "pause", False)
    assert panel_kernel.value("source.watched")


def test_pause_and_resume_inside_another_widget(ranks: Kernel) -> None:
    code = "import ipywidgets; source = Source(); panel = nbdist.Panel(source=source); ipywidgets.VBox([panel])"
    ranks.ok(SAMPLES + code)
    press(ranks, "opened", None)
    press(ranks, "pause", True)
    press(ranks, "pause", False)
    assert ranks.value("source.watched")
    ranks.ok("panel.close()")


def test_a_page_is_heard_while_a_cell_runs_and_the_cell_does_not_notice(panel_kernel: Kernel, tmp_path: Path) -> None:
    panel = {"id": panel_kernel.value("panel.state()['id']")}
    opening = {"comm_id": "line", "target_name": "nbdist.panel", "data": panel}
    end = tmp_path / "end"
    cell = panel_kernel.start(
        "import pathlib, time\n"
        "executed = []\n"
        "get_ipython().events.register('post_execute', note := lambda: executed.append(1))  # as matplotlib does\n"
        "print('begun')\n"
        f"while not pathlib.Path({str(end)!r}).exists(): time.sleep(0.01)\n"
        "get_ipython().events.unregister('post_execute', note)"
    )
    cell.wait_for("begun")
    assert send(panel_kernel, "comm_open", opening, at_once=True) == [{"type": "greeting"}]
    wish = {"comm_id": "line", "data": {"type": "pause", "value": True}}
    (answer,) = send(panel_kernel, "comm_msg", wish, at_once=True)
    end.touch()
    assert cell.finish().status == "ok"
    assert answer["head"]["live"] == "paused" and not panel_kernel.value("source.watched")
    assert panel_kernel.value("executed") == []


def test_nobody_hears_a_line_to_a_panel_that_is_gone(panel_kernel: Kernel) -> None:
    opening = {"comm_id": "lost", "target_name": "nbdist.panel", "data": {"id": "gone"}}
    assert send(panel_kernel, "comm_open", opening, at_once=True) == []
    wish = {"comm_id": "lost", "data": {"type": "pause", "value": True}}
    assert send(panel_kernel, "comm_msg", wish, at_once=True) == []
    assert panel_kernel.value("source.watched")


def test_rate(panel_kernel: Kernel) -> None:
    (answer,) = press(panel_kernel, "rate", 5)
    assert answer["head"]["rate"] == 5 == panel_kernel.value("source.rate")


def test_nobody_looks_after_the_last_page_has_closed_it(panel_kernel: Kernel) -> None:
    press(panel_kernel, "opened", None)
    press(panel_kernel, "closed", None)
    assert not panel_kernel.value("source.watched")
    press(panel_kernel, "opened", None)
    assert panel_kernel.value("source.watched")


def test_a_snapshot_that_cannot_be_written_says_why(panel_of_ranks: Kernel) -> None:
    notes = [answer["text"] for answer in press(panel_of_ranks, "snapshot", 1) if answer["type"] == "note"]
    assert len(notes) == 1 and "no GPU" in notes[0]


@pytest.mark.parametrize(("type_", "value"), [("rate", "soon"), ("metric", "luck"), ("snapshot", None)])
def test_nonsense_from_a_page_is_answered(panel_kernel: Kernel, type_: str, value: object) -> None:
    (answer,) = press(panel_kernel, type_, value)
    assert answer["type"] == "note" and answer["text"]


def test_a_rate_out_of_bounds_is_answered(panel_of_ranks: Kernel) -> None:
    notes = [answer["text"] for answer in press(panel_of_ranks, "rate", 1000) if answer["type"] == "note"]
    assert len(notes) == 1 and "0.25 to 60 s" in notes[0]


def test_a_page_of_another_version_does_no_harm(panel_kernel: Kernel) -> None:
    assert press(panel_kernel, "juggle", 3) == []


def test_bad_flags_are_explained(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist")
    assert "0.25 to 60 s" in kernel.fails("%distributed panel --rate 100", "UsageError").evalue
    assert "invalid duration" in kernel.fails("%distributed panel --rate soon", "UsageError").evalue
