"""Trains on the ranks of a session, interrupts at random moments of a chosen phase, and tells what became of it.

Owns the training program, in cells as a notebook would hold them, and the driver that interrupts it. All that is
random comes from one seed. Knows of the ranks what a user sees, and a byte for each in a shared file, by which they
tell that they have entered the phase.
"""

from __future__ import annotations

import json
import mmap
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbdist import RankError, RankTimeout, Session
from nbdist.client.session.session import rank_set_of

# How the model is made distributed, and on how many ranks.
WRAPPERS = {
    "DDP": (2, 4),
    "DDP static_graph": (2, 4),
    "DDP bucket view": (2, 4),
    "FSDP2": (2, 4),
    "HSDP 2x2": (4,),
    "by hand": (2, 4),
}
PHASES = ("forward", "backward", "all-reduce", "optimizer step", "data loading", "checkpoint write", "evaluation")

STEP_STOP, RAISED, FORCED = "step stop", "KeyboardInterrupt", "freed by force"
HANGS, LOST, UNEQUAL = "it hangs", "a rank was lost", "ranks differ"  # how a text that says what is wrong may begin

_LIMIT = 20.0  # seconds after which a cell that was interrupted counts as hanging
_STEPS = 1_000_000  # more than anybody waits for
_FIRST_STEPS = 5
_PEACEFUL_STEPS = 20  # after the interrupts: the training must still be able to go on
_DELAY = 0.005  # seconds that ranks stay longer in the phase, at most: else it would be too short to be hit

_SETUP = """
import gc, hashlib, json, mmap, os, random, time, types
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
import nbdist

marks = mmap.mmap(os.open({marks!r}, os.O_RDWR), 0)
folder, wrapper = {folder!r}, {wrapper!r}
delays = random.Random({seed} * 64 + rank)
interrupted_phase = ''


def enter(phase):
    if phase == interrupted_phase:
        marks[rank] = (marks[rank] + 1) % 256
        time.sleep(delays.uniform(0, {delay}))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.norm = nn.BatchNorm1d(32) if wrapper.startswith('DDP') else nn.Identity()
        self.dropout = nn.Dropout(0.1 if wrapper == 'DDP static_graph' else 0)

    def forward(self, x):
        first = self.first(x)
        if first.requires_grad:
            first.register_hook(lambda gradient: enter('all-reduce'))  # the last buckets are reduced behind it
        enter('forward')
        second = self.second(self.dropout(torch.relu(self.norm(first))))
        if second.requires_grad:
            second.register_hook(lambda gradient: enter('backward'))
        return self.last(torch.relu(second))


def distribute(model):
    if wrapper.startswith('DDP'):
        option = {{'DDP static_graph': 'static_graph', 'DDP bucket view': 'gradient_as_bucket_view'}}.get(wrapper)
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001, **({{option: True}} if option else {{}}))
    if 'SDP' in wrapper:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        shape, names = ((2, 2), ('replicate', 'shard')) if wrapper == 'HSDP 2x2' else ((world_size,), ('shard',))
        mesh = init_device_mesh('cpu', shape, mesh_dim_names=names)
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def average_gradients():
    if wrapper == 'by hand':
        for parameter in model.parameters():
            enter('all-reduce')
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size


def batch(step):
    generator = torch.Generator().manual_seed(64 * step + rank)
    x = torch.randn(16, 8, generator=generator)
    return x, torch.tanh(x.sum(1, keepdim=True))


def data(step):
    enter('data loading')
    return batch(step)


class Batches(Dataset):
    def __len__(self):
        return {steps}

    def __getitem__(self, step):
        return batch(step)


def remaining():
    for step in range(state.step, {steps}):
        enter('data loading')
        yield step


def save():
    enter('checkpoint write')
    whole = {{name: getattr(value, 'full_tensor', lambda: value)() for name, value in model.state_dict().items()}}
    if rank == 0:
        torch.save({{'model': whole, 'step': state.step}}, f'{{folder}}/part')
        enter('checkpoint write')
        os.replace(f'{{folder}}/part', f'{{folder}}/checkpoint')
    dist.barrier()


def evaluate():
    model.eval()
    total = torch.zeros(1)
    with torch.no_grad():
        for part in range(3):
            x, y = batch({steps} + part)
            enter('evaluation')
            total += (model(x) - y).square().mean()
    dist.all_reduce(total)
    model.train()
    return total.item() / 3 / world_size


def build():
    global model, optimizer, scheduler, state
    model = optimizer = scheduler = None
    gc.collect()  # else the model of before lives on for a while
    torch.manual_seed(0)
    model = distribute(Model())
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: enter('optimizer step'))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
    state = types.SimpleNamespace(step=0, loss=0.0, losses=[])


def place():
    counted = [int(values['step']) for values in optimizer.state.values()] or [0]
    return {{'optimizer': [min(counted), max(counted)], 'scheduler': scheduler.last_epoch, 'step': state.step}}


def weights():
    values = [getattr(value, '_local_tensor', value).clone() for value in optimizer.param_groups[0]['params']]
    values += [buffer.clone() for buffer in model.buffers()]
    return hashlib.sha256(b''.join(value.detach().numpy().tobytes() for value in values)).hexdigest()


def follow(leader):
    # What users keep of a training besides its model and optimizer, as it is on one rank.
    values = [vars(state), scheduler.state_dict()]
    dist.broadcast_object_list(values, leader)
    vars(state).update(values[0])
    scheduler.load_state_dict(values[1])
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr()):
        group['lr'] = rate


build()
save()
"""

_WHILE = """
model.train()
while state.step < {steps}:
    x, y = data(state.step)
"""
_LOADER = """
model.train()
for x, y in DataLoader(Batches(), batch_size=None, sampler=remaining(), num_workers=1):
"""
_BODY = """
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    average_gradients()
    optimizer.step()
    scheduler.step()
    state.step += 1
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    state.loss = mean.item() / world_size
    if state.step % 4 == 0:
        save()
    if state.step % 4 == 2:
        state.losses.append(evaluate())
"""


@dataclass
class Round:
    """One interrupt and what came of it.

    Attributes:
        asked: "once", "now" or "twice".
        how: How the cell ended: STEP_STOP, RAISED or FORCED; "" if in no such way.
        seconds: From the last request until the notebook could be used.
        wrong: What is against the promise, in words; "" for nothing.
        synced: Whether `nbdist.sync` was offered, and called.
        apart: What of the loop's own state differed between ranks, which only the user can mend.
        text: What the user saw.
    """

    asked: str
    how: str = ""
    seconds: float = 0.0
    wrong: str = ""
    synced: bool = False
    apart: str = ""
    text: str = ""


@dataclass
class Result:
    """What came of the interrupts in one phase.

    Attributes:
        rounds: Each of them, up to the first that broke the training.
        first_loss: Of the untrained model.
        last_loss: After the last interrupt and some steps more.
    """

    rounds: list[Round] = field(default_factory=list)
    first_loss: float = 0.0
    last_loss: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """Everything that is against the promise, for people."""
        found = [f"{each.wrong} (interrupted {each.asked})\n{each.text}" for each in self.rounds if each.wrong]
        if not found and not self.last_loss < self.first_loss:
            found.append(f"the loss does not fall: {self.first_loss:.3g}, then {self.last_loss:.3g}")
        return found

    def count(self, how: str) -> int:
        """How many rounds ended so."""
        return Counter(each.how for each in self.rounds)[how]

    def slowest(self, how: str) -> float:
        """Seconds that the slowest of the rounds that ended so has taken."""
        return max((each.seconds for each in self.rounds if each.how == how), default=0.0)


class Training:
    """A training that lives in a session and is interrupted.

    Args:
        session: Ranks that nobody else uses.
        wrapper: One of WRAPPERS.
        seed: Where all that is random comes from.
        folder: For the marks and the checkpoint.
    """

    def __init__(self, session: Session, wrapper: str, seed: int, folder: Path) -> None:
        self._session, self._wrapper, self._folder = session, wrapper, folder
        self._size = len(session.ranks)
        self._random = random.Random(seed)
        path = folder / "marks"
        path.write_bytes(bytes(self._size))
        with path.open("r+b") as file:
            self._marks = mmap.mmap(file.fileno(), 0)
        session.run(
            _SETUP.format(marks=str(path), folder=str(folder), wrapper=wrapper, seed=seed, delay=_DELAY, steps=_STEPS)
        )
        self._first_loss = self._evaluate()

    def interrupt(self, phase: str, count: int) -> Result:
        """Train and interrupt `count` times in this phase; to go on, the same cell is run again, at last in peace."""
        code = self._cell(phase)
        result = Result(first_loss=self._first_loss)
        for _ in range(count):
            found = self._round(code)
            result.rounds.append(found)
            if not found.how or found.wrong:
                return result
        self._session.run(self._cell("", self._place()[0]["step"] + _PEACEFUL_STEPS))
        result.last_loss = self._evaluate()
        self._session.run("torch.load(f'{folder}/checkpoint')", [0])  # is whole
        return result

    def weights_after(self, steps: int, phase: str = "") -> tuple[str, int]:
        """Train anew for some steps, interrupted in this phase, if any, until it is done.

        The first steps are made in peace: DDP lays out its buckets then, and with more than two ranks that layout is
        the order of summation, so a step that is lost there changes the last bits of the next.

        Returns:
            A hash of parameters and buffers of all ranks, and how often it was interrupted.
        """
        self._session.run("build()")
        self._session.run(self._cell("", _FIRST_STEPS))
        code = self._cell(phase, steps)
        interrupts = 0
        while phase and self._place()[0]["step"] < steps:
            found = self._round(code)
            if not found.how:
                break
            assert not found.wrong, f"{found.wrong}\n{found.text}"
            interrupts += 1
        self._session.run(code)
        printed = self._session.run("print(weights())")
        return "".join(printed[rank].stdout for rank in range(self._size)), interrupts

    def _cell(self, phase: str, steps: int = _STEPS) -> str:
        self._session.run(f"interrupted_phase = {phase!r}")
        head = _LOADER if phase == "data loading" and self._wrapper == "DDP" else _WHILE
        return head.format(steps=steps).rstrip() + _BODY

    def _evaluate(self) -> float:
        return float(self._session.run("print(evaluate())")[0].stdout)

    def _round(self, code: str) -> Round:
        cell = self._session.run_in_background(code, show=False)
        found = Round(self._random.choice(("once", "now", "twice")))
        if not self._reaches_phase(cell):
            found.wrong = f"{HANGS}: the training does not go on"
            found.text = "\n".join(row["doing"] for row in self._session.status())
            return found
        began = time.monotonic()
        cell.interrupt(now=found.asked == "now")
        if found.asked == "twice":
            time.sleep(self._random.uniform(0, 0.03))
            began = time.monotonic()
            cell.interrupt()
        error = _error_of(cell)
        found.seconds = time.monotonic() - began
        self._judge(found, error)
        return found

    def _reaches_phase(self, cell: Any) -> bool:
        """Wait until a random rank has entered the phase a random number of times, and a random moment after that."""
        rank, times = self._random.randrange(self._size), self._random.randint(1, 12)
        moment = self._random.uniform(0, 2 * _DELAY)
        start = self._marks[rank]
        deadline = time.monotonic() + _LIMIT
        while (self._marks[rank] - start) % 256 < times and not cell.done:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
        time.sleep(moment)
        return True

    def _judge(self, found: Round, error: BaseException | None) -> None:
        render = getattr(error, "_render_traceback_", None)
        found.text = "\n".join(render()) if render is not None else f"{type(error).__name__}: {error}"
        if error is None:
            return
        if len(rank_set_of(self._session).living()) < self._size:
            found.wrong = LOST
        elif isinstance(error, RankTimeout):
            found.wrong = f"{HANGS}: no end after {_LIMIT:g} s"
        elif not isinstance(error, KeyboardInterrupt):
            found.wrong = f"it ended with {type(error).__name__}"
        else:
            stopped = "all ranks stopped after step" in str(error)
            found.how = STEP_STOP if stopped else RAISED if found.asked == "once" else FORCED
            self._compare(found)

    def _compare(self, found: Round) -> None:
        """Do what the notebook says, and see whether the ranks are equal then."""
        advice = re.search(r"`(nbdist\.sync\(.*?\))`", found.text)
        if advice is not None:
            found.synced = True
            try:
                self._session.run(advice[1])
            except RankError as error:
                found.wrong = f"{UNEQUAL}, and sync can't mend it: {error}"
                return
        report = self._session.run("report = nbdist.check(model, optimizer)\nprint(json.dumps(list(report.differing)))")
        # DDP gives the first rank's BatchNorm statistics to all in the next forward, so they differ in between.
        differing = [name for name in json.loads(report[0].stdout) if ".norm." not in name]
        if differing:
            found.wrong = f"{UNEQUAL} in {', '.join(differing[:5])}"
        places = self._place()
        found.apart = "; ".join(
            f"{what} {[place[what] for place in places]}"
            for what in places[0]
            if any(place[what] != places[0][what] for place in places)
        )
        if found.apart:
            self._session.run(f"follow({max(range(self._size), key=lambda rank: int(places[rank]['step']))})")

    def _place(self) -> list[dict[str, Any]]:
        """Where each rank is in the training: what its optimizer, its scheduler and the loop have counted."""
        printed = self._session.run("print(json.dumps(place()))")
        return [json.loads(printed[rank].stdout) for rank in range(self._size)]


def _error_of(cell: Any) -> BaseException | None:
    try:
        cell.wait(_LIMIT)
    except BaseException as error:
        return error
    return None
