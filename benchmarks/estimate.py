"""How far real steps are from their estimates, and how long an estimate takes."""

from __future__ import annotations

from typing import Any

import _tools

ROUNDS = _tools.size(2, 1)
SETTINGS: list[dict[str, Any]] = [
    {"strategy": "none"},
    {"strategy": "none", "precision": "bf16"},
    {"strategy": "ddp"},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "precision": "bf16"},
    {"strategy": "fsdp", "accumulate": 3},
    {"strategy": "fsdp", "activation_checkpointing": "full"},
    {"strategy": "fsdp", "accumulate": 3, "activation_checkpointing": "full"},
]
AT_MOST = 1 / 0.9  # of the estimate: it is within 10 % of a real step


def main() -> None:
    _tools.prepare()
    from nbdist.client.session.session import Session
    from nbdist.plan import Plan
    from nbdist.train.estimate.estimate import estimate, estimate_each
    from testbed import train_estimate as models

    settings = SETTINGS[: _tools.size(len(SETTINGS), 1)]
    _tools.header("estimate: peak of a real step, ratio to what was estimated")
    with Session(2) as session:
        for kind in (models.Mlp, models.Gpt, models.ConvNet)[: _tools.size(3, 1)]:
            plans = [Plan(**each) for each in settings]
            for each, found in zip(
                settings, estimate_each(kind(), models.SHAPES[kind], plans, world_size=2), strict=True
            ):
                if kind is models.ConvNet and each == {"strategy": "fsdp", "precision": "bf16"}:
                    continue  # BatchNorm on the CPU takes no bf16 parameters beside float32 statistics
                peaks = [
                    max(rank["total"] for rank in session.call(models.measured, kind, **each)) / _tools.MB
                    for _ in range(ROUNDS)
                ]
                what = f"{kind.__name__}, {', '.join(str(value) for value in each.values())}"
                _tools.row(what, peaks, "MB", over=("the estimate", found.total / _tools.MB), at_most=AT_MOST)
    plan = Plan(strategy="fsdp")
    seconds = _tools.timed(lambda: estimate(models.Gpt(), models.SHAPES[models.Gpt], plan, world_size=8))
    _tools.row("an estimate, its process and all", _tools.rounds(ROUNDS, {"it": seconds})["it"])


if __name__ == "__main__":
    main()
