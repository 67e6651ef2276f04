"""The loss of all ranks in every step: nbdist.gather, reduce and check_trigger beside torch's own collectives."""

from __future__ import annotations

import _tools

RANKS = 2
ROUNDS = _tools.size(40, 2)
STEPS = _tools.size(10, 2)  # of one measurement: short, so that both sides of a round see the same machine
CALLS = _tools.size(50, 3)
WIDTH, BATCH = 512, 64

ON_RANKS = f"""
import time, torch, nbdist
import torch.distributed as dist

def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)

def reduced(tensor):
    result = tensor.clone()
    dist.all_reduce(result)
    return result

net = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range(4)))
model, optimizer = nbdist.prepare(net, torch.optim.AdamW(net.parameters()), plan=nbdist.Plan())
inputs, loss, number = torch.rand({BATCH}, {WIDTH}), torch.rand(()), torch.rand(256, 256)

def step(of_all):
    loss = model(inputs).square().mean()
    nbdist.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return of_all(loss)

MEASURES = {{
    "a step with all_gather(loss)": ({STEPS}, lambda: step(gathered)),
    "a step with nbdist.gather(loss)": ({STEPS}, lambda: step(nbdist.gather)),
    "all_gather(loss)": ({CALLS}, lambda: gathered(loss)),
    "nbdist.gather(loss)": ({CALLS}, lambda: nbdist.gather(loss)),
    "all_reduce(loss)": ({CALLS}, lambda: reduced(loss)),
    "nbdist.reduce(loss)": ({CALLS}, lambda: nbdist.reduce(loss)),
    "nbdist.check_trigger()": ({CALLS}, nbdist.check_trigger),
    "all_gather(256 KiB)": ({CALLS}, lambda: gathered(number)),
    "nbdist.gather(256 KiB)": ({CALLS}, lambda: nbdist.gather(number)),
}}
samples = {{name: [] for name in MEASURES}}
for turn in range(-1, {ROUNDS}):
    for name, (count, call) in MEASURES.items():
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            call()
        if turn >= 0:
            samples[name].append((time.perf_counter() - began) / count)
"""
PAIRS = [  # what is measured, what it is compared with, and the most that the ratio may be
    ("a step with nbdist.gather(loss)", "a step with all_gather(loss)", 1.05),
    ("nbdist.gather(loss)", "all_gather(loss)", None),
    ("nbdist.reduce(loss)", "all_reduce(loss)", None),
    ("nbdist.check_trigger()", "all_reduce(loss)", None),
    ("nbdist.gather(256 KiB)", "all_gather(256 KiB)", None),
]


def main() -> None:
    _tools.prepare()
    import nbdist

    with nbdist.Session(RANKS) as session:
        session.run(ON_RANKS)
        samples: dict[str, list[float]] = session.pull("samples", ranks=0)
    _tools.header(f"each of {RANKS} ranks (gloo)")
    for name in dict.fromkeys(base for _, base, _ in PAIRS):
        _tools.row(name, samples[name])
    for name, base, at_most in PAIRS:
        _tools.row(name, samples[name], over=(base, samples[base]), at_most=at_most)


if __name__ == "__main__":
    main()
