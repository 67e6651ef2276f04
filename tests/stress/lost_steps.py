"""Trains on forked ranks, loses steps half-way on purpose, and tells whether training went on as if it had not.

Run as a program it forks the ranks of one scenario after another: a line of JSON in, a line of JSON out. It stands in
for the rest of the recovery: connections are cut by the rank that fails, and new backends are put into the living
process groups.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS = 4
LIMIT = timedelta(seconds=5)  # also for a rank that enters a collective after its connections were cut


class Scenarios:
    """The program, from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.stress.lost_steps"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )

        self.pid = self._process.pid

    def run(self, model: str, *, lost: str, world: int = 2, buckets: str = "new") -> dict[str, Any]:
        """Train `model` on `world` ranks and lose steps. Gives what rank 0 found.

        `lost` is "first", "last" or "all" (but the first), a colon, and a place that _set_trap knows.
        `buckets`: "new", "kept", or "" for no reset at all.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        scenario = {"model": model, "lost": lost, "world": world, "buckets": buckets}
        self._process.stdin.write(json.dumps(scenario) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "failed" not in found, found["failed"]
        return found

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Answer scenarios until there are no more."""
    # All that ranks import, dynamo for their first optimizer step: once. Never a tensor operation in this process.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel  # noqa: F401

    import nbdist.worker.recovery.reset_models  # noqa: F401

    gc.freeze()
    for line in sys.stdin:
        scenario = json.loads(line)
        folder = Path(tempfile.mkdtemp())
        ranks = [_fork(rank, folder, scenario) for rank in range(scenario["world"])]
        for pid in ranks:
            os.waitpid(pid, 0)
        files = [folder / f"answer{rank}" for rank in range(scenario["world"])]
        answers = [json.loads(file.read_text()) if file.exists() else {"failed": "a rank has died"} for file in files]
        shutil.rmtree(folder)
        failed = [answer for answer in answers if "failed" in answer]
        print(json.dumps((failed or answers)[0]), flush=True)


def _fork(rank: int, folder: Path, scenario: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(2, 1)
            answer = Trial(rank, folder, **scenario).run()
        except BaseException:
            answer = {"failed": f"rank {rank} of {scenario}:\n{traceback.format_exc()}"}
        (folder / f"answer{rank}").write_text(json.dumps(answer))
        os._exit(0)
    return pid


class Trial:
    """One rank of a scenario."""

    def __init__(self, rank: int, folder: Path, model: str, lost: str, world: int, buckets: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._rank, self._kind, self._lost, self._buckets = rank, model, lost, buckets
        self._store = dist.FileStore(str(folder / "store"), world)
        self._generation = 0
        dist.init_process_group("gloo", store=self._store, rank=rank, world_size=world, timeout=LIMIT)

    def run(self) -> dict[str, Any]:
        """Train twice, once with steps that are lost, and compare."""
        import torch
        import torch.distributed as dist

        expected = self._train(lost=None)
        found = self._train(lost=self._lost)
        ranks = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, found)
        return {
            "difference": (found - expected).abs().max().item(),
            "ranks agree": all(torch.equal(other, found) for other in ranks),
            "notes": self._notes,
            "settled": self._settled,
        }

    def _train(self, lost: str | None) -> Any:
        import torch

        model, optimizer = build(self._kind)
        self._notes: list[str] = []
        self._settled: list[bool] = []
        when, _, where = lost.partition(": ") if lost else ("", "", "")
        steps = {"": [], "first": [0], "last": [STEPS - 1], "all": range(1, STEPS)}[when]
        for step in range(STEPS):
            if step in steps:
                self._lose(model, optimizer, step, where)
            optimizer.zero_grad()
            loss(self._kind, model, self._rank, step).backward()
            if self._kind == "by hand":
                _average(model)
            optimizer.step()
        parameters = [parameter.detach() for parameter in model.parameters()]
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
        return torch.cat([parameter.flatten() for parameter in whole])

    def _lose(self, model: Any, optimizer: Any, step: int, where: str) -> None:
        """A step that rank 1 does not end, and the recovery that follows."""
        from nbdist.worker.recovery.reset_models import buckets_settled, reset_models

        kept = None  # as the notebook keeps the loss and the traceback of a cell that failed
        try:
            optimizer.zero_grad()
            if self._rank == 1:
                _set_trap(model, where)
            kept = loss(self._kind, model, self._rank, step)
            kept.backward()
            if self._kind == "by hand":
                _average(model)
        except (RuntimeError, KeyboardInterrupt) as error:
            kept = (kept, error)
            _cut_connections()
        self._renew_groups()
        if self._buckets:
            self._settled.append(buckets_settled())
            report = reset_models(keep_buckets=self._buckets == "kept" and self._settled[-1])
            self._notes += report.notes
        del kept

    def _renew_groups(self) -> None:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo
        from torch.distributed import distributed_c10d as c10d

        self._generation += 1
        slot = ProcessGroup.BackendType(20 + self._generation)
        for group, name in sorted(c10d._world.pg_names.items(), key=lambda item: int(item[1])):
            store = dist.PrefixStore(f"{self._generation}/{name}", self._store)
            backend = ProcessGroupGloo(store, group.rank(), group.size(), timeout=LIMIT)
            backend._set_sequence_number_for_group()
            group._register_backend(torch.device("cpu"), slot, backend)


def _cut_connections() -> None:
    """Shut down every TCP connection of this process; with a FileStore all are gloo's. Peers then stop waiting."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # raises for one that listens, which must not be touched
                connection.shutdown(socket.SHUT_RDWR)


def build(kind: str) -> tuple[Any, Any]:
    """A small model with its optimizer, made distributed as `kind` says."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = _model()
    if kind.startswith("FSDP2"):
        world = dist.get_world_size()
        names = ("replicate", "shard") if "HSDP" in kind else ("shard",)
        mesh = init_device_mesh("cpu", (2, world // 2) if "HSDP" in kind else (world,), mesh_dim_names=names)
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        keywords: dict[str, Any] = {"mesh": mesh, **({"mp_policy": half} if "bf16" in kind else {})}
        for layer in model.layers[1:-1]:
            fully_shard(layer, **keywords)
        fully_shard(model, **keywords)
    elif kind.startswith("DDP"):
        option = kind.removeprefix("DDP").strip()
        keywords = {option: True} if "_" in option else {}
        model = DistributedDataParallel(model.double(), bucket_cap_mb=0.001, **keywords)
        if option == "hook":
            model.register_comm_hook(None, _hook)
        if option == "fp16":
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def _model() -> Any:
    """A chain of layers that are registered in another order than they run in: DDP's first buckets are not its last."""
    import torch

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [(8, 16), (16, 24), (24, 8), (8, 40), (40, 1)]
            self.layers = torch.nn.ModuleList(torch.nn.Linear(*width) for width in reversed(widths))

        def forward(self, batch: Any) -> Any:
            for layer in reversed(self.layers):
                batch = torch.tanh(layer(batch))
            return batch

    return Chain()


def loss(kind: str, model: Any, rank: int, step: int) -> Any:
    """The loss of this rank's own batch."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(4, 8, generator=generator)
    return model(batch.double() if kind.startswith("DDP") else batch).pow(2).float().mean()


def _hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations and can't read them as text
    import torch.distributed as dist

    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


def _average(model: Any) -> None:
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _set_trap(model: Any, where: str) -> None:
    """Let the next step fail: before it, in the forward, or early or late in the backward."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    def fail_in_backward(_module: object, _inputs: object, output: Any) -> None:
        handle.remove()
        output.register_hook(fail)

    def fail_in_forward(*_: object) -> None:
        handle.remove()
        raise KeyboardInterrupt

    if where == "before":
        raise KeyboardInterrupt
    layers = getattr(model, "module", model).layers
    place = {"forward": 2, "early backward": 1, "late backward": 3}[where]
    handle = layers[place].register_forward_hook(fail_in_forward if where == "forward" else fail_in_backward)


if __name__ == "__main__":
    main()
