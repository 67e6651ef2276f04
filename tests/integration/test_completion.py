from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testbed.kernel import LIMIT, Kernel, wait_until

DEFINITIONS = (
    "import torch\n"
    "model_on_ranks = torch.nn.Linear(2, 2)\n"
    "def train_on_ranks(steps, lr=0.1):\n"
    "    'Trains it.'\n"
    "    return steps * 1234\n"
    "settings = {'alpha': 1, 'beta': 2}\n"
    "shared_name = 'on the ranks'"
)


@pytest.fixture(scope="module", autouse=True)
def names(ranks: Kernel) -> None:
    ranks.ok(f"%%distributed\n{DEFINITIONS}")
    ranks.ok("%%rank 1\nonly_on_one = 1")
    ranks.ok("model_in_notebook = 1\nshared_name = {'in': 'the notebook'}")


@pytest.fixture
def busy(ranks: Kernel) -> Iterator[Kernel]:
    """All ranks run something."""
    ranks.ok("%%distributed --background\nimport time\nwhile True: time.sleep(0.01)")
    ranks.ok("handle = _")
    yield ranks
    ranks.ok("handle.interrupt()\ntry: handle.wait(30)\nexcept KeyboardInterrupt: pass")


def complete(kernel: Kernel, before: str, after: str = "") -> list[str]:
    """What Tab offers, as the text before the cursor would then end."""
    reply = kernel.client.complete(before + after, len(before), reply=True, timeout=LIMIT)["content"]
    assert reply["cursor_end"] == len(before)
    typed = before[reply["cursor_start"] :]
    assert all(match.startswith(typed) for match in reply["matches"])
    return list(reply["matches"])


def inspect(kernel: Kernel, code: str) -> str:
    """What Shift-Tab shows; empty if it finds nothing."""
    reply: dict[str, Any] = kernel.client.inspect(code, reply=True, timeout=LIMIT)["content"]
    return str(reply["data"]["text/plain"]) if reply["found"] else ""


@pytest.mark.parametrize("magic", ["%%distributed", "%%dist -r 1", "%%rank 0"])
def test_names_of_ranks_are_completed_in_their_cells(ranks: Kernel, magic: str) -> None:
    assert complete(ranks, f"{magic}\nx = 1\nmodel_") == ["model_on_ranks"]


def test_names_of_the_rank_that_was_named_are_completed(ranks: Kernel) -> None:
    assert complete(ranks, "%%distributed -r 1\nonly_on") == ["only_on_one"]
    assert complete(ranks, "%%distributed -r 0\nonly_on") == []
    assert complete(ranks, "%%rank 1\nonly_on") == ["only_on_one"]


def test_attributes_and_keys_are_completed_on_the_ranks(ranks: Kernel) -> None:
    assert complete(ranks, "%%distributed\nmodel_on_ranks.wei") == [".weight"] or complete(
        ranks, "%%distributed\nmodel_on_ranks.wei"
    ) == ["weight"]
    assert complete(ranks, "%%distributed\nsettings['al") == ["alpha"]


def test_text_behind_the_cursor_does_not_matter(ranks: Kernel) -> None:
    assert complete(ranks, "%%distributed\nmodel_", "\ny = 2") == ["model_on_ranks"]


def test_names_of_the_notebook_are_not_offered_for_ranks_nor_the_other_way_round(ranks: Kernel) -> None:
    assert complete(ranks, "%%distributed\nmodel_in") == []
    assert complete(ranks, "model_") == ["model_in_notebook"]
    assert complete(ranks, "%%local\nmodel_") == ["model_in_notebook"]


def test_with_auto_on_every_cell_completes_on_the_ranks(ranks: Kernel) -> None:
    ranks.ok("%distributed auto on")
    assert complete(ranks, "model_") == ["model_on_ranks"]
    assert complete(ranks, "%%local\nmodel_") == ["model_in_notebook"]
    ranks.ok("%distributed auto off")


@pytest.mark.parametrize(
    ("before", "offered"),
    [
        ("%distributed sta", ["stacks", "start", "status"]),
        ("%dist re", ["restart"]),
        ("x = 1\n%distributed fr", ["free"]),
        ("%distributed start --ba", ["--backend"]),
        ("%distributed start -n 2 --re", ["--replace"]),
        ("%distributed logs --t", ["--tail"]),
        ("%distributed pull model_on_ranks --a", ["--as"]),
        ("%distributed auto o", ["on", "off"]),
        ("%distributed push model_", ["model_in_notebook"]),
        ("%distributed push shared_name model_", ["model_in_notebook"]),
        ("%distributed pull model_", ["model_on_ranks"]),
        ("%distributed xyzzy --", []),
        ("%%distributed --ba", ["--background"]),
        ("%%dist -r 0 --ca", ["--capture"]),
        ("%%distr", ["%%distributed"]),
    ],
)
def test_the_magics_own_words_are_completed(ranks: Kernel, before: str, offered: list[str]) -> None:
    assert complete(ranks, before) == offered


def test_all_verbs_are_offered(ranks: Kernel) -> None:
    verbs = "auto free interrupt logs pull push restart start status stop"
    assert set(verbs.split()) <= set(complete(ranks, "%distributed "))


def test_busy_ranks_offer_their_last_known_names_at_once(busy: Kernel) -> None:
    assert complete(busy, "%%distributed\nmodel_") == ["model_on_ranks"]
    assert complete(busy, "%distributed pull train_") == ["train_on_ranks"]
    assert complete(busy, "%%distributed\nmodel_on_ranks.wei") == []


def test_names_that_a_failed_cell_has_made_are_known(ranks: Kernel) -> None:
    ranks.fails("%%distributed\nmade_before_failing = 1\n1/0", "RankError")
    assert complete(ranks, "%distributed pull made_before") == ["made_before_failing"]


@pytest.mark.parametrize("code", ["%%distributed\ntrain_on_ranks", "train_on_ranks", "%%rank 1\nx = train_on_ranks"])
def test_shift_tab_shows_documentation_from_the_ranks(ranks: Kernel, code: str) -> None:
    assert "Trains it." in inspect(ranks, code)


def test_shift_tab_in_a_cell_for_ranks_shows_the_ranks_variable_of_a_shared_name(ranks: Kernel) -> None:
    assert "on the ranks" in inspect(ranks, "%%distributed\nshared_name")
    assert "the notebook" in inspect(ranks, "shared_name")


def test_shift_tab_on_busy_ranks_says_so_at_once(busy: Kernel) -> None:
    assert "train_on_ranks lives on ranks, which are busy" in inspect(busy, "%%distributed\ntrain_on_ranks")


def test_shift_tab_knows_nothing_of_unknown_names(ranks: Kernel) -> None:
    assert inspect(ranks, "%%distributed\nnever_heard_of") == ""


def shown_in_pager(kernel: Kernel, code: str) -> str:
    """What a cell puts into the pager."""
    reply = kernel.client.execute(code, reply=True, timeout=LIMIT)["content"]
    return "".join(page["data"]["text/plain"] for page in reply["payload"] if page["source"] == "page")


def test_a_question_mark_in_a_local_cell_finds_names_that_only_ranks_have(ranks: Kernel) -> None:
    assert "Trains it." in shown_in_pager(ranks, "train_on_ranks?")
    assert "1234" in shown_in_pager(ranks, "train_on_ranks??")
    assert "the notebook" in shown_in_pager(ranks, "shared_name?")
    assert "not found" in ranks.ok("never_heard_of?").stdout


def test_a_question_mark_on_busy_ranks_says_so(busy: Kernel) -> None:
    assert "which are busy" in shown_in_pager(busy, "train_on_ranks?")


def test_ranks_that_are_done_answer_again(ranks: Kernel) -> None:
    ranks.ok("%%distributed\nlater_name = 1")
    wait_until(lambda: complete(ranks, "%%distributed\nlater_") == ["later_name"], "the new name")
