"""How far the peaks of real steps on a GPU are from their estimates, and what lies outside torch's own figures."""

from __future__ import annotations

from typing import Any

import _tools

SETTINGS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp", "precision": "bf16"},
    {"strategy": "fsdp", "precision": "bf16", "activation_checkpointing": "full"},
]
AT_LEAST, AT_MOST = 0.9, 1 / 0.9  # of the estimate: it is within 10 % of a real step, on either side


def main() -> None:
    device = _tools.gpu()
    _tools.prepare()
    from nbdist.client.session.session import Session
    from nbdist.plan import Plan
    from nbdist.train.estimate.estimate import estimate_each
    from testbed import gpu_programs as programs

    width, depth = (4096, 16) if device == "cuda" else (64, 2)
    plans = [Plan(**each) for each in SETTINGS]
    _tools.header(f"peak of a step, {depth} layers {width} wide, AdamW, 2 ranks")
    with Session(2) as session:
        model = programs.net(width, depth)
        for plan, found in zip(plans, estimate_each(model, (32, width), plans, world_size=2), strict=True):
            what = f"{plan.strategy}, {plan.precision}, checkpointing {plan.activation_checkpointing}"
            peaks = session.call(programs.peak_of_a_step, plan, width, depth)
            inside = (found.total - found.outside_torch) / _tools.MB
            real = [each["peak"] / _tools.MB for each in peaks]
            _tools.row(what, real, "MB", over=("the estimate", inside), at_least=AT_LEAST, at_most=AT_MOST)
        outside = [each["outside"] / _tools.MB for each in peaks if each["outside"]]
        if outside:
            _tools.row("outside torch, of one rank", outside, "MB", over=("the estimate", found.outside_torch / 1e6))
    if device == "cpu":
        print("a rehearsal: these are no figures")


if __name__ == "__main__":
    main()
