"""`%distributed save` and `start --from`: a session that goes on elsewhere as if it had never stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kernel import Kernel, lines_by_rank, wait_until
from tests.support.spare import without_session

HANG = 60.0

SETUP = """%%distributed --setup
import torch, nbdist
from types import SimpleNamespace
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1))
torch.manual_seed(0)
net = Net()
data = torch.randn(96, 8)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
model, optimizer, loader = nbdist.prepare(net, optimizer, loader)
state = SimpleNamespace(step=0, epoch=0)
"""
TRAIN = """%%distributed
def train(epochs):
    while state.epoch < epochs:
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            state.step += 1
        state.epoch += 1
"""
RESULT = """%%distributed
whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
print(*[p.double().abs().sum().item().hex() for p in whole], state.step, state.epoch, torch.rand(1).item())
"""
SUM = """%%distributed
whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
print(sum(p.double().abs().sum().item() for p in whole))
"""


@pytest.fixture
def empty(notebook: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """The module's kernel, without a session before and after, in a new folder."""
    with without_session(notebook, tmp_path) as kernel:
        yield kernel


def shown(kernel: Kernel, cell: str) -> dict[int, list[str]]:
    return lines_by_rank(kernel.ok(cell).stdout)


def saved(kernel: Kernel, line: str = "saves") -> str:
    return kernel.ok(f"%distributed save {line}", HANG).stdout


def restored(kernel: Kernel, line: str = "") -> str:
    return kernel.ok(f"%distributed start --from saves {line}", HANG).stdout


def train_and_save(kernel: Kernel, plan: str, count: int, then: str = "") -> None:
    kernel.ok(f"%distributed start -n {count}", HANG)
    kernel.ok(f"%distributed plan {plan}")
    kernel.ok(SETUP)
    kernel.ok(TRAIN)
    kernel.ok(f"%%distributed\ntrain(2)\n{then}", HANG)
    saved(kernel)


@pytest.mark.parametrize(
    ("plan", "count"), [("ddp", 2), ("fsdp", 2), ("ddp", 4)]
)  # more than two are summed in an order
def test_a_run_that_was_saved_and_goes_on_equals_one_that_never_stopped_bit_for_bit(
    empty: Kernel, plan: str, count: int
) -> None:
    train_and_save(empty, plan, count)
    empty.ok("%%distributed\ntrain(4)", HANG)
    expected = shown(empty, RESULT)
    empty.ok("%distributed stop")
    told = restored(empty)
    assert "ran as setup: cell" in told and f"saved by {count} ranks" in told and f"{count} ranks ready" in told
    empty.ok("%%distributed\ntrain(4)", HANG)
    assert shown(empty, RESULT) == expected


def test_it_may_go_on_with_another_number_of_ranks_and_another_strategy(empty: Kernel) -> None:
    train_and_save(empty, "ddp", 2, "held = next(model.parameters())")
    expected = shown(empty, SUM)[0]
    empty.ok("%distributed stop")
    empty.ok("%distributed plan fsdp")
    told = restored(empty, "-n 3")
    assert "3 ranks ready" in told and "the plan was different" in told
    now = shown(empty, SUM)
    assert shown(empty, "%%distributed\nprint(net is model, held is next(model.parameters()))") == {
        rank: ["True True"] for rank in range(3)
    }
    assert [float(line) for lines in now.values() for line in lines] == pytest.approx(
        [float(expected[0])] * 3, rel=1e-6
    )
    empty.ok("%%distributed\ntrain(3)\nassert state.epoch == 3", HANG)


def test_names_that_all_ranks_have_alike_are_on_added_ranks_and_those_that_differ_are_named(empty: Kernel) -> None:
    empty.ok("%distributed start -n 2", HANG)
    empty.ok("%%distributed\nalike, own = ['x'], rank * 10")
    saved(empty)
    empty.ok("%distributed stop")
    assert "not the same on all 2 ranks: own; rank 2 can have them from setup cells only" in restored(empty, "-n 3")
    held = shown(empty, "%%distributed\nprint(alike, globals().get('own'))")
    assert held == {0: ["['x'] 0"], 1: ["['x'] 10"], 2: ["['x'] None"]}


def test_functions_see_the_names_of_the_new_session(empty: Kernel) -> None:
    empty.ok("%distributed start -n 1", HANG)
    empty.ok("%%distributed\nrate = 1\ndef read(): return rate\nlater = lambda: rate")
    saved(empty)
    empty.ok("%distributed stop")
    restored(empty)
    assert shown(empty, "%%distributed\nrate = 7\nprint(read(), later())") == {0: ["7 7"]}


def test_a_definition_that_needs_a_name_which_comes_later_stops_nothing(empty: Kernel) -> None:
    empty.ok("%distributed start -n 1", HANG)
    empty.ok("%%distributed\nrate = 3")
    empty.ok("%%distributed\ndef read(value=rate): return value\nclass Own:\n    kept = rate")
    empty.ok("%%distributed\nthing = Own()")
    saved(empty)
    empty.ok("%distributed stop")
    restored(empty)
    assert shown(empty, "%%distributed\nprint(read(), thing.kept, type(thing) is Own)") == {0: ["3 3 True"]}


def test_a_name_that_can_not_be_saved_but_that_setup_cells_make_is_not_missing(empty: Kernel) -> None:
    empty.ok("%distributed start -n 1", HANG)
    empty.ok("%%distributed --setup\nimport threading\nlock = threading.Lock()")
    assert "not saved: lock: it is a _thread.lock" in saved(empty)
    empty.ok("%distributed stop")
    assert "not restored" not in restored(empty)
    assert shown(empty, "%%distributed\nprint(lock.locked())") == {0: ["False"]}


def test_a_save_that_is_interrupted_leaves_the_earlier_one_and_ranks_that_work(empty: Kernel, tmp_path: Path) -> None:
    empty.ok("%distributed start -n 2", HANG)
    empty.ok("%%distributed\nvalue = 1")
    saved(empty)
    slow = "import os\nclass Slow:\n    def __reduce__(self):\n        open('begun', 'w').close()\n"
    slow += "        while True: pass\nslow = Slow()"
    empty.ok(f"%%distributed -r 1\n{slow}")
    cell = empty.start("%distributed save saves")
    wait_until((tmp_path / "begun").exists, "the save", 30)
    empty.interrupt()
    assert cell.finish().ename == "KeyboardInterrupt"
    empty.ok("%%distributed -r 1\ndel slow")
    assert shown(empty, "%%distributed\nprint(value)") == {0: ["1"], 1: ["1"]}
    saved(empty)
    assert empty.value("sorted(os.listdir('saves'))") == ["save-1", "save-2"]


def test_what_can_not_be_saved_is_named_with_the_reason_and_its_cell(empty: Kernel) -> None:
    empty.ok("%distributed start -n 2", HANG)
    empty.ok("%%distributed\nnumbers = (n for n in range(3))\nkept = 1")
    cell = empty.value("len(In) - 1")
    told = saved(empty)
    assert f"not saved: numbers: it is a generator (cell {cell})" in told
    empty.ok("%distributed stop")
    assert "not restored: numbers: it is a generator" in restored(empty)
    assert shown(empty, "%%distributed\nprint(kept, 'numbers' in globals())") == {0: ["1 False"], 1: ["1 False"]}


def test_a_model_that_no_setup_cell_prepares_is_left_to_the_user_with_what_to_run(empty: Kernel) -> None:
    empty.ok("%distributed start -n 2", HANG)
    empty.ok(SETUP.replace(" --setup", ""))
    cell = empty.value("len(In) - 1")
    empty.ok(TRAIN)
    empty.ok("%%distributed\ntrain(1)", HANG)
    expected = shown(empty, SUM)
    assert "no cell is marked as setup" in saved(empty)
    empty.ok("%distributed stop")
    told = restored(empty)
    assert f"run cell {cell} again, then `nbdist.load_state('saves/save-1')` on all ranks" in told
    assert "not restored: net: it is, or holds, a part of a model that no setup cell prepares" in told
    empty.ok(SETUP)
    empty.ok("%%distributed\nnbdist.load_state('saves/save-1')")
    assert shown(empty, SUM) == expected


def test_running_cells_are_stopped_after_the_same_step_if_asked(empty: Kernel) -> None:
    train_and_save(empty, "ddp", 2)
    empty.ok("%%distributed --background --capture cell\nprint('trains')\ntrain(10**6)")
    empty.ok("while not nbdist.get_session().logs(cell=None): pass")
    saved(empty, "saves --stop")
    steps = shown(empty, "%%distributed\nprint(state.step)")
    assert steps[0] == steps[1] and int(steps[0][0]) > 0
    manifest = json.loads(Path(empty.value("os.getcwd()"), "saves/save-2/checkpoint.json").read_text())
    assert manifest["steps"] == int(steps[0][0])


def test_the_newest_two_saves_stay(empty: Kernel) -> None:
    empty.ok("%distributed start -n 1", HANG)
    for _ in range(3):
        saved(empty)
    assert empty.value("sorted(os.listdir('saves'))") == ["save-2", "save-3"]
    saved(empty, "saves --keep 1")
    assert empty.value("os.listdir('saves')") == ["save-4"]


# --- what goes wrong


def test_a_full_disk_leaves_the_earlier_save_whole(empty: Kernel) -> None:
    empty.ok("%distributed start -n 2", HANG)
    empty.ok("%%distributed\nvalue = 1")
    saved(empty)
    full = "import resource\nlimits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))\n"
    empty.ok(f"%%distributed -r 1\n{full}\nbig = bytes(10**6)")
    told = empty.fails("%distributed save saves", "CheckpointError").evalue
    assert "save-2 was not saved" in told and "File too large" in told
    assert empty.value("os.listdir('saves')") == ["save-1"]
    empty.ok("%distributed stop")
    restored(empty)
    assert shown(empty, "%%distributed\nprint(value)") == {0: ["1"], 1: ["1"]}


def test_a_setup_cell_that_fails_says_so_and_leaves_no_session(empty: Kernel) -> None:
    empty.ok("%distributed start -n 1", HANG)
    empty.ok("%%distributed --setup\nimport os\nassert not os.path.exists('gone')")
    saved(empty)
    empty.ok("%distributed stop")
    empty.ok("open('gone', 'w').close()")
    failed = empty.fails("%distributed start --from saves", "RankError", HANG)
    assert "the session was not restored, as setup cell" in failed.evalue
    assert empty.value("nbdist.client.session.current.living_session() is None")


def test_a_dead_rank_is_refused(empty: Kernel) -> None:
    empty.ok("%distributed start -n 2", HANG)
    empty.fails("%%distributed -r 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "RankDied")
    assert "rank 1" in empty.fails("%distributed save saves", "UsageError").evalue
    assert not empty.value("os.path.exists('saves')")


def test_a_session_without_a_process_group_is_refused(empty: Kernel) -> None:
    empty.ok("%distributed start -n 2 --no-init", HANG)
    assert "without `--no-init`" in empty.fails("%distributed save saves", "UsageError").evalue


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        ("pass", "there is no folder 'saves' in"),
        ("os.mkdir('saves')", "saves holds no save of a session: `%distributed save` makes one"),
        (
            "os.makedirs('saves/save-1.partial')",
            "saves holds no save of a session: it holds only saves that did not finish (save-1.partial)",
        ),
    ],
)
def test_a_folder_without_a_save_is_one_error_and_nothing_starts(empty: Kernel, prepare: str, told: str) -> None:
    empty.ok(prepare)
    assert told in empty.fails("%distributed start --from saves", "UsageError").evalue
    assert empty.value("nbdist.client.session.current.living_session() is None")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"python": "3.1"}, "was saved by Python 3.1, and this is Python"),
        ({"format": 99, "nbdist": "9.0"}, "was saved by a newer nbdist (9.0): upgrade nbdist to load it"),
    ],
)
def test_a_save_of_another_version_is_refused_before_anything_starts(
    empty: Kernel, tmp_path: Path, change: dict[str, object], told: str
) -> None:
    empty.ok("%distributed start -n 1", HANG)
    saved(empty)
    empty.ok("%distributed stop")
    file = tmp_path / "saves/save-1/session.json"
    size = file.stat().st_size
    text = json.dumps(json.loads(file.read_text()) | change)
    manifest = tmp_path / "saves/save-1/checkpoint.json"
    file.write_text(text)
    manifest.write_text(manifest.read_text().replace(f'"session.json": {size}', f'"session.json": {len(text)}'))
    assert told in str(empty.run("%distributed start --from saves").traceback)


def test_a_damaged_save_is_one_error(empty: Kernel, tmp_path: Path) -> None:
    empty.ok("%distributed start -n 1", HANG)
    saved(empty)
    empty.ok("%distributed stop")
    (tmp_path / "saves/save-1/names-00000.pt").write_bytes(b"")
    told = empty.fails("%distributed start --from saves", "CheckpointError").evalue
    assert "saves/save-1 is incomplete: names-00000.pt has 0 bytes instead of" in told


def test_a_folder_with_checkpoints_of_the_users_own_is_refused(empty: Kernel) -> None:
    empty.ok("%distributed start -n 1", HANG)
    empty.ok(SETUP)
    empty.ok("%%distributed\nnbdist.save_state('saves/step-1')")
    told = empty.fails("%distributed save saves", "UsageError").evalue
    assert "saves holds checkpoints of save_state (step-1): give another folder" in told
    empty.ok("%distributed stop")
    told = empty.fails("%distributed start --from saves", "UsageError").evalue
    assert "saves/step-1 is a checkpoint of save_state, without the names of a session" in told
