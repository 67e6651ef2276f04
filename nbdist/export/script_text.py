"""The text around the cells: the head of the script, its helpers, the command that runs it, and a batch script."""

from __future__ import annotations

import re
import shlex
import textwrap

from nbdist.export.draft import RankStart, ScriptDraft

_HELPERS = {
    "everyone": '''
def everyone(value):
    """Return the value of every rank, by rank."""
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values
''',
    "from_rank_0": '''
def from_rank_0(value):
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
''',
    "show": '''
def show(value):
    """Print what a notebook shows below a cell."""
    if value is not None:
        print(f"{value!r}\\n", end="", flush=True)
''',
    "notebook_random_numbers": '''
def random_states():
    """Return the states of the random generators."""
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def set_random_states(python, numpys, torchs):
    """Set them to what `random_states` has returned."""
    random.setstate(python)
    numpy.random.set_state(numpys)
    torch.set_rng_state(torchs)


states_of_notebook = random_states()


@contextlib.contextmanager
def notebook_random_numbers():
    """Draw other random numbers than rank 0: the notebook was a process of its own."""
    global states_of_notebook
    states_of_rank = random_states()
    set_random_states(*states_of_notebook)
    try:
        yield
    finally:
        states_of_notebook = random_states()
        set_random_states(*states_of_rank)
''',
}
_USES_NBDIST = re.compile(r"^(?!#).*\bnbdist\.", re.MULTILINE)
_NEEDS = {"notebook_random_numbers": {"contextlib", "random", "numpy"}}
_PLACE = """
# What every rank of the notebook has. Without torchrun, this process is the only rank.
rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
world_size, local_world_size = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
gpus = torch.cuda.device_count()
device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
"""
_GROUP = """backend = {backend}
if "RANK" in os.environ:
    dist.init_process_group(backend)
else:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
"""
_END = """if dist.is_initialized():
    gc.collect()
    dist.destroy_process_group()
    gc.collect()  # what holds the group: gloo's threads have to end before Python does"""
_BACKEND = '"cpu:gloo,cuda:nccl" if gpus >= local_world_size else "gloo"'


def script_text(draft: ScriptDraft, notebook: str, script: str, remarks: list[str]) -> str:
    """Return the whole script.

    Args:
        draft: The cells.
        notebook: The name of the notebook's file.
        script: The name of the script's file.
        remarks: What the user has to know of the whole.
    """
    start = draft.start
    parts = [_docstring(draft, notebook, script, remarks)]
    if start is None:
        parts.append(_imports(draft.modules | ({"nbdist"} & draft.helpers), needs_torch=False))
        parts += [text for name, text in _HELPERS.items() if name == "show" and name in draft.helpers]
        return _joined([*parts, *draft.blocks])
    modules = draft.modules | {"gc", "os"}
    if any(_USES_NBDIST.search(block) for block in draft.blocks):
        modules.add("nbdist")
    modules |= {module for name in draft.helpers for module in _NEEDS.get(name, set())}
    parts.append(_imports(modules, needs_torch=True))
    group = _GROUP.format(backend=repr(start.backend) if start.backend else _BACKEND) if start.init else ""
    parts.append(_PLACE.strip("\n") + "\n" + group)
    parts += [f"\n{text.strip()}\n" for name, text in _HELPERS.items() if name in draft.helpers]
    end = [_END]
    return _joined([*parts, *draft.blocks, "# %% the end\n" + end[0]])


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _docstring(draft: ScriptDraft, notebook: str, script: str, remarks: list[str]) -> str:
    lines = [f"Exported from {notebook} by `nbdist export`. Run it with", "", f"    {command(draft.start, script)}", ""]
    if remarks:
        lines += [*remarks, ""]
    if draft.notes:
        lines += ["What is not as in the notebook:", *(_item(note) for note in draft.notes), ""]
    text = "\n".join(lines).rstrip().replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}\n"""'


def _item(note: str) -> str:
    return textwrap.fill(" ".join(note.split()), 118, initial_indent="- ", subsequent_indent="  ")


def _imports(modules: set[str], *, needs_torch: bool) -> str:
    standard = sorted(modules - {"nbdist", "numpy"})
    others = sorted(modules & {"numpy"}) + (["torch", "torch.distributed as dist"] if needs_torch else [])
    own = sorted(modules & {"nbdist"})
    groups = ["\n".join(f"import {name}" for name in group) for group in (standard, others, own) if group]
    return "# %% what the cells need\n" + "\n\n".join(groups) if groups else ""


def command(start: RankStart | None, script: str) -> str:
    """Return the command that runs the script."""
    name = shlex.quote(script)
    if start is None:
        return f"python {name}"
    variables = f"CUDA_VISIBLE_DEVICES={start.gpus} " if start.gpus else ""
    nodes = ""
    if start.nodes > 1:
        nodes = f"--nnodes {start.nodes} --node-rank 0 --master-addr ADDRESS --master-port 29500 "
    restarts = "--max-restarts 3 " if start.restarts else ""
    return f"{variables}torchrun {nodes}{restarts}--nproc-per-node {ranks_per_node(start)} {name}"


def ranks_per_node(start: RankStart) -> str:
    """Return the number of ranks on each machine, as torchrun takes it."""
    return {"": "gpu", "?": "2"}.get(start.count, start.count)


def batch_text(start: RankStart, script: str, name: str) -> str:
    """Return a batch script for Slurm that runs the script on all nodes of its job."""
    count = ranks_per_node(start)
    gpus = f"#SBATCH --gpus-per-node={count}\n" if count != "gpu" else "#SBATCH --gpus-per-node=1\n"
    restarts = " --max-restarts 3" if start.restarts else ""
    return f"""#!/bin/bash
# Submit it with: sbatch {name}. Change what your cluster wants: partition, account, time.
#SBATCH --job-name={script.removesuffix(".py")}
#SBATCH --nodes={start.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --output=%x-%j.log

set -eu
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node {count}{restarts} \\
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:29500" \\
    {shlex.quote(script)}
"""
