"""`%%distributed --profile` in a real kernel."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from testbed.kernel import Kernel


def test_a_profiled_cell_shows_where_its_time_went_and_writes_one_trace(ranks: Kernel, tmp_path: Path) -> None:
    target = tmp_path / "trace.json.gz"
    text = ranks.run(
        f"%%distributed --profile {target}\nimport torch\nimport torch.distributed as dist\n"
        "dist.all_reduce(torch.ones(4))\nprint('done')"
    ).stdout
    assert "gloo:all_reduce" in text
    assert "USDT" not in text
    with gzip.open(target) as file:
        names = {e["args"].get("name") for e in json.load(file)["traceEvents"] if e["name"] == "process_name"}
    assert {"rank 0", "rank 1"} <= names


def test_a_cell_that_fails_is_profiled_as_far_as_it_came(ranks: Kernel, tmp_path: Path) -> None:
    outcome = ranks.run(
        f"%%distributed --profile {tmp_path / 'trace.json'}\nimport torch\ntorch.ones(4, 4) @ torch.ones(4, 4)\n1 / 0"
    )
    assert outcome.status == "error"
    assert "aten::mm" in outcome.stdout
