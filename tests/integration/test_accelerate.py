"""Accelerate's own tests, from the installed package, through our launchers; and Accelerate inside launched functions.

What they do on GPUs only is left to GPUs: in `test_metrics` the parts that download a model, in `test_sync` gradient
accumulation. Of `test_distributed_data_loop` the tests of `join_uneven_inputs` are left out, which Accelerate has for
GPUs only: on CPUs they wait for ever, through its own debug_launcher too.
"""

from __future__ import annotations

import inspect

import pytest

from testbed.kernel import Kernel

pytest.importorskip("accelerate")

IMPORT = "from accelerate import PartialState, notebook_launcher\n"
OURS = "from accelerate import PartialState\nfrom nbdist import notebook_launcher\n"
LIMIT = 200.0  # seconds; ranks import Accelerate each time, and what it imports


@pytest.fixture
def kernel(notebook: Kernel) -> Kernel:
    notebook.ok("import os\nfrom nbdist import debug_launcher, notebook_launcher")
    return notebook


# --- its tests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("test_ops", "testing sending tensors across devices"),
        ("test_sync", "gradient accumulation with optimizer and scheduler"),
        ("test_script", "**Test reinstantiated state**"),
        ("external_deps.test_metrics", "**Test that `drop_last` is taken into account**"),
    ],
)
def test_a_script_s_main_passes_on_two_ranks(kernel: Kernel, script: str, last: str) -> None:
    outcome = kernel.ok(f"import accelerate.test_utils.scripts.{script} as script\ndebug_launcher(script.main)", LIMIT)
    assert last in outcome.stdout, str(outcome)


@pytest.mark.slow
def test_its_data_loaders_are_split_over_two_ranks(kernel: Kernel) -> None:
    kernel.ok(
        "import accelerate.test_utils.scripts.test_distributed_data_loop as script\n"
        "def main():\n"
        "    accelerator = script.create_accelerator()\n"
        "    script.test_default_ensures_even_batch_sizes()\n"
        "    script.test_can_disable_even_batches()\n"
        "    script.test_pickle_accelerator()\n"
        "    for shuffle in (False, True):\n"
        "        data = script.DummyDataset()\n"
        "        loader = script.DataLoader(data, shuffle=shuffle, batch_size=script.BATCH_SIZE, num_workers=2)\n"
        "        script.test_data_loader(loader, accelerator)\n"
        "    script.test_stateful_dataloader(accelerator)\n"
        "    script.test_stateful_dataloader_save_state(accelerator)\n"
        "    return accelerator.num_processes"
    )
    kernel.ok("result = debug_launcher(main)", LIMIT)
    assert kernel.value("result") == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        "test_can_initialize",
        "test_clean_cuda_fork",
        "test_static_rdzv_backend",
        "test_c10d_rdzv_backend",
        "test_monitoring",
    ],
)
def test_its_notebook_script_with_the_import_replaced_passes(notebook_script: Kernel, test: str) -> None:
    notebook_script.ok(f"{test}()", LIMIT)


# Of two ranks that both see the last trial in the queue one would wait for it forever, by any launcher. And the one
# that has it would wait in `PartialState` for the other, which may have returned.
ONE_CRACKS_THE_NUT = """
PartialState, crack = str, tough_nut_function
def tough_nut_function(queue):
    if os.environ["RANK"] == "0":
        crack(queue)
"""


@pytest.mark.slow
def test_its_test_of_restarts_passes_forked_as_its_queue_can_not_travel(notebook_script: Kernel) -> None:
    notebook_script.ok(ONE_CRACKS_THE_NUT)
    outcome = notebook_script.ok("test_fault_tolerant()", LIMIT)
    notebook_script.ok("from accelerate import PartialState")
    assert "forked from the notebook, because args[0] is a multiprocessing.queues.Queue" in outcome.stdout
    assert "all ranks start again (3 of 3)" in outcome.stdout


@pytest.fixture(scope="module")
def notebook_script(notebook: Kernel) -> Kernel:
    """A kernel with the functions of Accelerate's test of its notebook_launcher, which call ours."""
    import accelerate.test_utils.scripts.test_notebook as script

    source = inspect.getsource(script)
    assert source.count(IMPORT) == 1
    notebook.ok("import os\nos.environ['ACCELERATE_NUM_PROCESSES'] = '2'")
    notebook.ok(source.replace(IMPORT, OURS).partition("\nif __name__")[0])
    return notebook


# --- Accelerate in a function


@pytest.mark.parametrize("state", ["PartialState()", "Accelerator()"])
def test_its_states_see_all_ranks_on_the_cpu(kernel: Kernel, state: str) -> None:
    kernel.ok(
        "def train():\n"
        "    from accelerate import Accelerator, PartialState\n"
        f"    state = {state}\n"
        "    return state.num_processes, state.process_index, state.device.type\n"
        "result = notebook_launcher(train, num_processes=2)"
    )
    assert kernel.value("result") == [(2, 0, "cpu"), (2, 1, "cpu")]


@pytest.mark.parametrize(("precision", "dtype"), [("no", "float32"), ("bf16", "bfloat16")])
def test_mixed_precision_takes_effect_in_an_accelerator(kernel: Kernel, precision: str, dtype: str) -> None:
    kernel.ok(
        "def train():\n"
        "    import torch\n"
        "    from accelerate import Accelerator\n"
        "    accelerator = Accelerator()\n"
        "    with accelerator.autocast():\n"
        "        computed = torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "    return accelerator.mixed_precision, str(computed.dtype)\n"
        f"result = notebook_launcher(train, num_processes=2, mixed_precision={precision!r})"
    )
    assert kernel.value("result") == [(precision, f"torch.{dtype}")] * 2


def test_a_model_is_trained_alike_on_all_ranks(kernel: Kernel) -> None:
    kernel.ok(
        "def train(steps):\n"
        "    import torch\n"
        "    from accelerate import Accelerator\n"
        "    from accelerate.utils import set_seed\n"
        "    set_seed(0)\n"
        "    accelerator = Accelerator()\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "    for _ in range(steps):\n"
        "        optimizer.zero_grad()\n"
        "        accelerator.backward((model(torch.ones(4, 2) * accelerator.process_index) - 1).square().mean())\n"
        "        optimizer.step()\n"
        "    return accelerator.unwrap_model(model).weight.tolist()\n"
        "result = notebook_launcher(train, (3,), num_processes=2)"
    )
    assert kernel.value("result[0] == result[1]") is True
