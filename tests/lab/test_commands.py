"""The sidebar's buttons as commands of JupyterLab: in its palette, with keys, enabled where they can act."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, expect

from testbed.lab import LOOP, PREBUILT, Lab, Notebook, show_sidebar, start_loop

pytestmark = pytest.mark.lab

SCHEMA = PREBUILT / "nbdist" / "schemas" / "nbdist" / "ranks.json"
ACTIONS = ("interrupt", "interrupt-now", "stacks", "why", "heal", "restart", "stop")
ENDS_RANK_1 = """\
%%distributed --background
import os
if rank == 1: os._exit(3)"""


@pytest.fixture(scope="module")
def notebook(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    cells = ["%load_ext nbdist", "%distributed start -n 2", LOOP, ENDS_RANK_1, "%distributed stop"]
    with Notebook(lab, browser, cells) as notebook:
        notebook.run(0)
        yield notebook


def enabled(notebook: Notebook) -> set[str]:
    ask = "names => names.filter(name => jupyterapp.commands.isEnabled(`nbdist:${name}`))"
    return set(notebook.page.evaluate(ask, ACTIONS))


def shortcuts(schema: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(schema.read_text()).get("jupyter.lab.shortcuts", [])
    return found


def keys_of(shortcut: dict[str, Any], system: str) -> tuple[str, ...]:
    return tuple(key for key in shortcut.get(f"{system}Keys") or shortcut["keys"] if key)


def test_no_key_is_one_of_jupyterlabs_or_the_beginning_of_one() -> None:
    ours = shortcuts(SCHEMA)
    assert {shortcut["command"] for shortcut in ours} > {f"nbdist:{action}" for action in ACTIONS}
    schemas = Path(str(distribution("jupyterlab").locate_file("jupyterlab/schemas"))).rglob("*.json")
    theirs = [shortcut for schema in schemas for shortcut in shortcuts(schema)]
    assert len(theirs) > 50
    for system in ("linux", "mac", "win"):
        mine = [keys_of(shortcut, system) for shortcut in ours]
        assert len(set(mine)) == len(mine)
        assert not {keys[:1] for keys in mine} & {keys_of(shortcut, system)[:1] for shortcut in theirs}


def test_a_command_is_enabled_only_where_it_can_act(notebook: Notebook) -> None:
    assert enabled(notebook) == set()
    notebook.run(1)
    notebook.wait_until(lambda: enabled(notebook) == {"stacks", "why", "restart", "stop"}, "commands of idle ranks")
    start_loop(notebook, 2)
    running = {"interrupt", "interrupt-now", "stacks", "why", "restart", "stop"}
    notebook.wait_until(lambda: enabled(notebook) == running, "commands of busy ranks")
    notebook.page.keyboard.press("Control+Alt+Shift+K")
    notebook.wait_until(lambda: "interrupt" not in enabled(notebook), "the interrupt")
    expect(notebook.page.locator(".nbdist-sidebar")).to_have_count(0)  # it has nothing to say
    notebook.run(3)
    notebook.wait_until(lambda: "heal" in enabled(notebook), "a dead rank")
    notebook.page.keyboard.press("Control+Alt+Shift+H")
    notebook.wait_until(lambda: "heal" not in enabled(notebook), "a healed rank")


def test_each_button_is_a_command_with_a_key_in_the_palette(notebook: Notebook) -> None:
    page = notebook.page
    bound = "() => jupyterapp.commands.keyBindings.map(({ command, keys }) => [command, keys])"
    page.wait_for_function(f"({bound})().some(([command]) => command === 'nbdist:stop')")
    keys = dict(page.evaluate(bound))
    assert {f"nbdist:{action}" for action in ACTIONS} <= keys.keys()
    notebook.command("apputils:activate-command-palette", {})
    page.locator(".lm-CommandPalette-input").fill("stacks of ranks")
    item = page.locator(".lm-CommandPalette-item").filter(has_text="Show Stacks of Ranks")
    expect(item).to_be_visible()  # JupyterLab lists only what is enabled
    expect(item.locator(".lm-CommandPalette-itemShortcut")).to_have_text("Ctrl+Alt+Shift+T")
    page.keyboard.press("Escape")


def test_a_key_shows_its_answer_in_the_sidebar_which_it_opens(notebook: Notebook) -> None:
    sidebar = show_sidebar(notebook)
    notebook.command("application:toggle-right-area", {})
    expect(sidebar).to_be_hidden()
    notebook.page.keyboard.press("Control+Alt+Shift+T")
    expect(sidebar.locator(".nbdist-sidebar-text")).to_contain_text("ranks 0-1")


def test_stop_asks_first(notebook: Notebook) -> None:
    page = notebook.page
    page.keyboard.press("Control+Alt+Shift+D")
    expect(page.locator(".jp-Dialog")).to_contain_text("Stop the ranks?")
    page.locator(".jp-Dialog").get_by_role("button", name="Cancel").click()
    assert "stop" in enabled(notebook)
    page.keyboard.press("Control+Alt+Shift+D")
    page.locator(".jp-Dialog .jp-mod-warn").click()
    notebook.wait_until(lambda: enabled(notebook) == set(), "the end of the session")
