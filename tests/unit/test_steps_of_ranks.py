"""Several ranks that are interrupted at any moment stop after the same step."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from nbdist.base.processes import die_with_parent
from nbdist.worker.cell.interrupts import StepStop
from nbdist.worker.recovery.step_stop import StepCounter
from tests.support.stepping import MANY

pytestmark = pytest.mark.torch_private


RANKS = 4
INTERRUPTS = 30
SEED = 7


@pytest.mark.slow
def test_ranks_interrupted_at_any_moment_stop_after_the_same_step() -> None:
    """The ranks are forked from a process that has run no tensor operation, as a rank's template has not."""
    program = "from tests.unit import test_steps_of_ranks; test_steps_of_ranks.interrupt_ranks()"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    cells = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cells) == INTERRUPTS
    for ends in cells:
        assert len(ends) == RANKS
        assert all(end == ends[0] for end in ends), "as many steps and collectives, and the same weights"
        assert ends[0]["stopped"] in (None, ends[0]["steps"])
        assert ends[0]["steps"] == ends[0]["bodies"] == ends[0]["scheduler"]
    assert sum(ends[0]["stopped"] is not None for ends in cells) >= INTERRUPTS // 2


class Rank:
    """A rank as its controller sees it: lines of JSON go both ways."""

    def __init__(self, number: int, rendezvous: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        controller = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(controller)
                _be_rank(number, theirs, rendezvous)
            finally:
                os._exit(1)
        self._socket, self._lines = ours, ours.makefile()
        self._early: list[dict[str, Any]] = []

    def send(self, **message: Any) -> None:
        _send(self._socket, message)

    def receive(self, kind: str) -> dict[str, Any]:
        """The next message of this kind."""
        for message in self._early:
            if kind in message:
                self._early.remove(message)
                return dict(message[kind])
        while kind not in (message := json.loads(self._lines.readline())):
            self._early.append(message)
        return dict(message[kind])


def interrupt_ranks() -> None:
    """The controller's part: starts ranks, interrupts cells at random moments, prints how each ended on each rank."""
    moments = random.Random(SEED)
    rendezvous = socket.create_server(("127.0.0.1", 0))
    ranks = [Rank(number, rendezvous) for number in range(RANKS)]
    for serial in range(1, INTERRUPTS + 1):
        plan = {
            "serial": serial,
            "steps": moments.choice([2, MANY, MANY]),  # some end before they are stopped
            "micro": moments.choice([1, 1, 3]),
            "delay": moments.choice([0, 0.001, 0.005]),
            "late": moments.choice([0, 0.03]),
        }
        print(json.dumps(_interrupt(ranks, plan, moments)), flush=True)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)


def _interrupt(ranks: list[Rank], plan: dict[str, Any], moments: random.Random) -> list[dict[str, Any]]:
    for rank in ranks:
        rank.send(cell=plan)
    time.sleep(moments.random() * moments.choice([0.01, 0.1, 0.3]))
    for rank in moments.sample(ranks, RANKS):
        rank.send(arm=plan["serial"])
        time.sleep(moments.random() * 0.01)  # control messages arrive at very different moments
    target = max(rank.receive("armed")["count"] for rank in ranks) + 1
    for rank in moments.sample(ranks, RANKS):
        rank.send(aim=plan["serial"], target=target)
        time.sleep(moments.random() * 0.01)
    return [rank.receive("ended") for rank in ranks]


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _be_rank(number: int, channel: socket.socket, rendezvous: socket.socket) -> None:
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1",
        rendezvous.getsockname()[1],
        is_master=number == 0,
        master_listen_fd=os.dup(rendezvous.fileno()) if number == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    counter = StepCounter()
    counter.install()
    cells: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_answer, args=(channel, counter, cells), daemon=True).start()
    while True:
        _train(number, cells.get(), model, counter, channel)


def _answer(channel: socket.socket, counter: StepCounter, cells: SimpleQueue[dict[str, Any]]) -> None:
    for line in channel.makefile():
        message = json.loads(line)
        if "arm" in message:
            _send(channel, {"armed": msgspec.structs.asdict(counter.arm(message["arm"]))})
        elif "aim" in message:
            counter.aim(message["aim"], message["target"])
        else:
            cells.put(message["cell"])


def _train(number: int, plan: dict[str, Any], model: nn.Module, counter: StepCounter, channel: socket.socket) -> None:
    import torch.distributed as dist

    pace = random.Random(plan["serial"] * RANKS + number)
    optimizer = AdamW(model.parameters(), 1e-3)
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    bodies = 0
    time.sleep(pace.random() * plan["late"])
    counter.begin(plan["serial"])
    with contextlib.suppress(StepStop):
        for _ in range(plan["steps"]):
            for _ in range(plan["micro"]):
                time.sleep(pace.random() * plan["delay"])
                model(torch.randn(4, 8)).pow(2).mean().backward()
            work = dist.all_reduce(torch.ones(1), async_op=True)
            optimizer.step()
            optimizer.zero_grad()
            work.wait()
            dist.all_reduce(torch.ones(1))
            scheduler.step()
            bodies += 1
    counter.end(plan["serial"])
    end = {
        "steps": counter.count,
        "stopped": counter.stopped,
        "bodies": bodies,
        "scheduler": scheduler.last_epoch,
        "collectives": cast(Any, dist.group.WORLD)._get_backend(torch.device("cpu"))._get_sequence_number_for_group(),
        "weights": sum(float(p.detach().double().sum()) for p in model.parameters()),
    }
    _send(channel, {"ended": end})
