"""The picker in the toolbar and the badges at cells: where cells run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="pip install playwright")

from playwright.sync_api import Browser, Locator, expect

from testbed.lab import CURRENT, Lab, Notebook, expect_place, move_cell

pytestmark = pytest.mark.lab

TIMED = "%%time\n%%distributed -r 1\nprint('here', rank)"
PLAN = "kept = 1\n%distributed plan ddp"
AUTO = "print('auto', rank)"
PRINT = "%%distributed\nprint('printed', rank)"
EDITED = "first = 1\nsecond = 2"


@pytest.fixture(scope="module")
def two(lab: Lab, browser: Browser) -> Iterator[Notebook]:
    """A notebook with two ranks."""
    cells = [
        "%load_ext nbdist\n%distributed start -n 2",
        TIMED,
        PLAN,
        "%distributed auto on",
        AUTO,
        "%distributed auto off",
        PRINT,
        EDITED,
        "kept = 1",
    ]
    with Notebook(lab, browser, cells) as notebook:
        notebook.run(0)
        yield notebook


def cell_of(notebook: Notebook, index: int) -> Locator:
    return notebook.page.locator(".jp-Cell").nth(index)


def output_of(notebook: Notebook, index: int) -> str:
    outputs = notebook.page.evaluate(f"index => {CURRENT}.content.widgets[index].model.outputs.toJSON()", index)
    return "".join(output["text"] for output in outputs)


def test_the_line_is_found_and_changed_below_magics_that_run_the_rest_of_the_cell(two: Notebook) -> None:
    cell = cell_of(two, 1)
    expect_place(cell, "rank 1")
    two.choose(1)
    two.page.locator(".nbdist-run-on").select_option("all")
    assert two.source(1) == "%%time\n%%distributed\nprint('here', rank)"
    two.run(1)
    assert "[0] here 0" in output_of(two, 1) and "Wall time" in output_of(two, 1)


def test_a_cell_with_a_magic_of_the_notebook_is_left_alone_and_the_page_says_why(two: Notebook) -> None:
    cell = cell_of(two, 2)
    move_cell(cell, "all")
    dialog = two.page.locator(".jp-Dialog")
    expect(dialog).to_contain_text("A cell with the line '%distributed plan ddp' cannot run on ranks.")
    dialog.get_by_role("button", name="Ok").click()
    expect_place(cell, "kernel")
    assert two.source(2) == PLAN


def test_with_auto_on_a_plain_cell_is_shown_on_all_ranks_and_can_be_kept_in_the_kernel(two: Notebook) -> None:
    cell = cell_of(two, 4)
    expect_place(cell, "kernel")
    two.run(3)
    expect_place(cell, "all ranks")
    expect_place(cell_of(two, 3), "kernel")  # it cannot run on ranks
    two.run(4)
    expect(cell_of(two, 4).get_by_role("tab")).to_have_count(3)
    move_cell(cell, "kernel")
    assert two.source(4) == f"%%local\n{AUTO}"
    move_cell(cell, "all")
    assert two.source(4) == AUTO
    two.choose(4)
    two.command("nbdist:toggle-ranks", {})
    expect(two.page.locator(".nbdist-run-on")).to_have_value("kernel")
    assert two.source(4) == f"%%local\n{AUTO}"
    move_cell(cell, "all")
    two.run(5)
    expect_place(cell, "kernel")


def test_with_auto_on_a_page_that_was_reloaded_has_the_same_badges_and_tabs(two: Notebook) -> None:
    two.run(3)
    two.run(4)
    two.save()
    two.reload()
    expect_place(cell_of(two, 4), "all ranks")
    expect(cell_of(two, 4).get_by_role("tab")).to_have_count(3)
    two.run(5)
    expect_place(cell_of(two, 4), "kernel")


@pytest.mark.parametrize("commands", [["duplicate-below"], ["copy-cell", "paste-cell-below"]])
def test_a_copy_of_a_cell_has_its_badge_and_tabs_at_once(two: Notebook, commands: list[str]) -> None:
    two.run(6)
    two.choose(6)
    for command in commands:
        two.command(f"notebook:{command}", {})
    expect_place(cell_of(two, 7), "all ranks")
    expect(two.page.locator(".jp-Cell").nth(7).get_by_role("tab")).to_have_count(3)
    two.choose(7)
    two.command("notebook:delete-cell", {})


@pytest.mark.parametrize("line", [0, 1], ids=["at the start", "below"])
def test_the_cursor_stays_at_its_text_when_the_cell_moves(two: Notebook, line: int) -> None:
    cell = two.page.locator(".jp-Cell").nth(7)
    cell.locator(".cm-line").nth(line).click()
    two.page.keyboard.press("Home")
    two.page.keyboard.press("Control+Alt+r")
    assert two.source(7) == f"%%distributed\n{EDITED}"
    two.page.keyboard.type("X")
    words = EDITED.split("\n")
    words[line] = f"X{words[line]}"
    assert two.source(7) == "\n".join(["%%distributed", *words])
    two.page.keyboard.press("Backspace")
    two.page.keyboard.press("Control+Alt+r")
    two.page.keyboard.type("Y")
    words[line] = words[line].replace("X", "Y")
    assert two.source(7) == "\n".join(words)
    two.page.keyboard.press("Backspace")


def test_one_undo_takes_a_move_back(two: Notebook) -> None:
    two.page.locator(".jp-Cell").nth(8).locator(".cm-line").first.click()
    two.page.keyboard.press("Control+Alt+r")
    assert two.source(8) == "%%distributed\nkept = 1"
    two.page.keyboard.press("Control+z")
    assert two.source(8) == "kept = 1"


def test_a_cell_that_may_not_be_edited_is_left_alone(two: Notebook) -> None:
    two.page.evaluate(f"{CURRENT}.content.widgets[8].model.sharedModel.setMetadata('editable', false)")
    badge = cell_of(two, 8).locator(".nbdist-badge-of-cell")
    expect(badge).to_be_disabled()
    expect(badge).to_have_attribute("title", "This cell is read-only.")
    two.choose(8)
    expect(two.page.locator(".nbdist-run-on")).to_be_disabled()
    two.command("nbdist:toggle-ranks", {})
    assert two.source(8) == "kept = 1"
    two.command("nbdist:choose-ranks", {})
    expect(two.page.locator(".jp-Dialog")).to_have_count(0)


def test_the_picker_comes_with_the_first_cell_on_ranks_also_if_it_is_pasted(lab: Lab, browser: Browser) -> None:
    with Notebook(lab, browser, ["x = 1"]) as notebook:
        notebook.command("notebook:insert-cell-below", {})
        expect(notebook.page.locator(".nbdist-run-on")).to_have_count(0)
        cell = {"cell_type": "code", "source": "%%distributed\nx = 1", "metadata": {}}
        notebook.page.evaluate(f"cell => {{ {CURRENT}.content.model.sharedModel.insertCell(2, cell) }}", cell)
        expect_place(cell_of(notebook, 2), "all ranks")
        expect_place(cell_of(notebook, 0), "kernel")


def test_only_the_badge_that_somebody_points_at_is_a_picker(lab: Lab, browser: Browser) -> None:
    """A browser's autofill looks at all controls of forms whenever there is a new one: hundreds make a page slow."""
    with Notebook(lab, browser, ["%%distributed\nx = 1"] * 20) as notebook:
        badges, pickers = (notebook.page.locator(f"{kind}.nbdist-badge-of-cell") for kind in ("button", "select"))
        expect(badges).to_have_count(20)
        expect(notebook.page.locator(".jp-Cell :is(select, input)")).to_have_count(0)
        for index in (0, 1):
            cell_of(notebook, index).locator(".nbdist-badge-of-cell").hover()
            expect(cell_of(notebook, index).locator("select.nbdist-badge-of-cell")).to_be_visible()
            expect(pickers).to_have_count(1)
