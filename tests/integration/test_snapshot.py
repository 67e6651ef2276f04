"""`%distributed snapshot`: torch's record of the device memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.kernel import Kernel


@pytest.mark.parametrize("options", ["", "-r 0", "--record"])
def test_without_a_gpu_it_is_said_what_to_use_instead(ranks: Kernel, options: str) -> None:
    outcome = ranks.fails(f"%distributed snapshot {options}", "UsageError")
    assert "%distributed memory on" in outcome.evalue


@pytest.mark.gpu
def test_each_rank_writes_a_file_that_names_who_allocated(own_ranks: Kernel, tmp_path: Path) -> None:
    own_ranks.run(f"%cd {tmp_path}\n%distributed snapshot --record")
    own_ranks.run("%%distributed\nimport torch\nkept = torch.ones(1 << 20, device=device)")
    assert own_ranks.run("%distributed snapshot -r 0").status == "ok"
    assert (tmp_path / "snapshot-rank0.pickle").stat().st_size > 0
