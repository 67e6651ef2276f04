"""push and pull of 8 GiB between the notebook and a GPU, beside what the bus does for the same bytes."""

from __future__ import annotations

import _tools

ROUNDS = 2
BYTES = 1 << _tools.size(33, 24)

# The same tensor between GPU and pinned memory, and between GPU and ordinary memory.
_BUS = f"""
import time, torch
def seconds(work):
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
there = torch.ones({BYTES}, dtype=torch.uint8, device=device)
ordinary = torch.ones({BYTES}, dtype=torch.uint8)
pinned = ordinary.pin_memory() if device.type == "cuda" else ordinary
"""


def main() -> None:
    _tools.gpu()
    _tools.prepare()
    import torch

    from nbdist.client.session.session import Session

    tensor = torch.ones(BYTES, dtype=torch.uint8)
    with Session(1) as session:
        session.run(_BUS)

        def measured(code: str) -> float:
            return float(session.run(f"seconds(lambda: {code})")[0].result or "nan")

        def push() -> None:
            session.push({"x": tensor}, ranks=[0])
            session.run("x = x.to(device); x.sum().item()")

        samples = _tools.rounds(
            ROUNDS,
            {
                "pinned in": lambda: measured("there.copy_(pinned)"),
                "in": lambda: measured("there.copy_(ordinary)"),
                "pinned out": lambda: measured("pinned.copy_(there)"),
                "out": lambda: measured("ordinary.copy_(there)"),
                "push": _tools.timed(push),
                "pull": _tools.timed(lambda: session.pull("there", ranks=0)),
            },
        )
    _tools.header(f"{BYTES / 2**30:.2g} GiB, one rank")
    _tools.row("to the GPU from pinned memory", samples["pinned in"])
    _tools.row("to the GPU from ordinary memory", samples["in"])
    _tools.row("from the GPU to pinned memory", samples["pinned out"])
    _tools.row("from the GPU to ordinary memory", samples["out"])
    _tools.row("push, and to the GPU", samples["push"], over=("ordinary memory", samples["in"]))
    _tools.row("pull of a tensor on the GPU", samples["pull"], over=("ordinary memory", samples["out"]))


if __name__ == "__main__":
    main()
