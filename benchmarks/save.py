"""How long a checkpoint keeps training waiting: written at once, and asynchronously, the first time and later on."""

from __future__ import annotations

import tempfile

import _tools

RANKS = 2
ROUNDS = _tools.size(5, 1)
LAYERS, WIDTH = _tools.size(24, 2), _tools.size(2048, 64)  # sharded over 2 ranks, with AdamW: 576 MiB on each
SHARE = 0.1  # of a synchronous save

ON_RANKS = f"""
import time, torch, nbdist

net = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))
optimizer = torch.optim.AdamW(net.parameters())
model, optimizer = nbdist.prepare(net, optimizer, plan=nbdist.Plan(strategy="fsdp"))
model(torch.rand(2, {WIDTH})).square().mean().backward()
optimizer.step()
optimizer.zero_grad()

def seconds(folder, asynchronous):
    nbdist.wait_for_everyone()
    began, busy = time.perf_counter(), time.thread_time()
    save = nbdist.save_state(folder, asynchronous=asynchronous)
    blocked, busy = time.perf_counter() - began, time.thread_time() - busy
    save.wait()
    return blocked, busy, time.perf_counter() - began

def measured(folder):
    samples = {{"sync": [], "first": [], "async": [], "busy": [], "whole": []}}
    for turn in range({ROUNDS} + 1):
        samples["sync"].append(seconds(folder, False)[0])
        blocked, busy, whole = seconds(folder, True)
        samples["async" if turn else "first"].append(blocked)
        samples["busy"].append(busy)
        samples["whole"].append(whole)
    return samples
"""


def main() -> None:
    _tools.prepare()
    import nbdist

    with nbdist.Session(RANKS) as session, tempfile.TemporaryDirectory() as folder:
        session.run(ON_RANKS)
        session.run(f"samples = measured({folder + '/checkpoint'!r})")
        samples = session.pull("samples", ranks=0)
    size = LAYERS * WIDTH * WIDTH * 4 * 3 / RANKS / 2**20
    _tools.header(f"a checkpoint of {size:.0f} MiB on each of {RANKS} ranks")
    _tools.row("save_state()", samples["sync"])
    base = ("save_state()", _tools.quantile(samples["sync"], 0.5))
    _tools.row("save_state(asynchronous=True), the first", samples["first"], over=base)
    _tools.row("save_state(asynchronous=True), later ones", samples["async"], over=base, at_most=SHARE)
    _tools.row("  processor time of that", samples["busy"])
    _tools.row("  until it is written", samples["whole"])


if __name__ == "__main__":
    main()
