"""What a profile's shares mean, on traces made by hand; and traces of several ranks as one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nbdist.client.costs.profiles import CellProfile, render
from nbdist.errors import UsageError
from nbdist.metrics.profile import Summary, merge, profiled, summarize


def event(name: str, start: float, length: float, *, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    """An event of a trace; times in milliseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": start * 1000, "dur": length * 1000, "tid": tid, "pid": 1}


def test_time_without_any_operation_is_idle() -> None:
    summary = summarize([event("aten::mm", 0, 20), event("aten::add", 50, 10)], 0, 0.1)
    assert (summary.busy, summary.communication, summary.idle) == pytest.approx((0.3, 0.0, 0.7))


def test_a_hidden_collective_is_counted_as_communication_but_not_twice_as_work() -> None:
    summary = summarize([event("aten::mm", 0, 50), event("gloo:all_reduce", 20, 40, tid=2)], 0, 0.1)
    assert (summary.busy, summary.communication, summary.idle) == pytest.approx((0.5, 0.4, 0.4))


def test_what_only_spans_others_is_not_work() -> None:
    annotation = event("DistributedDataParallel.forward", 0, 100, cat="user_annotation")
    assert summarize([annotation, event("aten::mm", 0, 10)], 0, 0.1).idle == pytest.approx(0.9)


def test_where_kernels_run_on_a_gpu_its_time_counts() -> None:
    summary = summarize([event("aten::mm", 0, 90), event("gemm", 10, 30, cat="kernel", tid=7)], 0, 0.1)
    assert summary.device == "cuda"
    assert summary.busy == pytest.approx(0.3)


def test_an_operations_own_time_is_without_what_it_calls() -> None:
    events = [event("aten::linear", 0, 30), event("aten::mm", 5, 20), event("aten::mm", 40, 5, tid=2)]
    own: dict[str, object] = {
        operation.name: (operation.calls, operation.own) for operation in summarize(events, 0, 0.1).operations
    }
    assert own == {"aten::mm": (2, pytest.approx(0.025)), "aten::linear": (1, pytest.approx(0.010))}


def test_a_profile_holds_what_ran_and_a_trace_of_it(tmp_path: Path) -> None:
    import torch

    with profiled(str(tmp_path), 3) as summaries:
        torch.ones(8, 8) @ torch.ones(8, 8)
    (summary,) = summaries
    assert "aten::mm" in {operation.name for operation in summary.operations}
    merge(summaries, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert "rank 3" in {e["args"].get("name") for e in events if e["name"] == "process_name"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json"]


def test_work_that_raises_is_profiled_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), profiled(str(tmp_path), 0) as summaries:
        raise ZeroDivisionError
    assert summaries[0].trace


def test_a_trace_that_can_not_be_written_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with profiled(str(tmp_path / "file"), 0) as summaries:
        pass
    assert "gave no trace" in summaries[0].why


def test_a_merged_trace_may_be_compressed(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    for number, part in enumerate(parts):
        part.write_text(json.dumps({"name": "x", "pid": number}))
    merge([Summary(n, 1.0, trace=str(part)) for n, part in enumerate(parts)], tmp_path / "all.json.gz")
    with gzip.open(tmp_path / "all.json.gz") as file:
        assert [e["pid"] for e in json.load(file)["traceEvents"]] == [0, 1]


def test_the_table_names_the_slowest_rank_of_each_operation() -> None:
    quick = summarize([event("aten::mm", 0, 10)], 0, 0.1)
    slow = summarize([event("aten::mm", 0, 40)], 1, 0.1)
    text = render([quick, slow])
    assert "40.0 ms @1" in text
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["rank", "0", "1"]


def test_a_rank_without_a_profile_is_named_with_the_reason() -> None:
    assert "rank 2: no trace" in render([Summary(2, 1.0, why="no trace")])


@pytest.mark.parametrize("path", ["trace.txt", "/no/such/folder/trace.json"])
def test_a_file_that_can_not_be_is_refused_before_the_cell_runs(path: str) -> None:
    with pytest.raises(UsageError, match="--profile"):
        CellProfile(path, 1)


@pytest.mark.parametrize(
    "kernel",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymDevArgs)",
        "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)",
        "multimem_all_reduce_kernel",
        "two_shot_all_reduce_kernel",
        "Memcpy PtoP (Device -> Device)",
        "void deep_ep::internode::dispatch<false, 8>(int4*, float*)",
        "rcclDevKernel_Generic",
    ],
)
def test_kernels_that_move_data_between_gpus_are_communication(kernel: str) -> None:
    work = event("void cutlass::Kernel2<cutlass_80_tensorop_bf16>()", 0, 20, cat="kernel")
    summary = summarize([work, event(kernel, 50, 30, cat="kernel")], 0, 0.1)
    assert (summary.busy, summary.communication) == pytest.approx((0.2, 0.3))


def test_a_profile_says_first_which_rank_is_waited_for() -> None:
    ranks = [Summary(rank, 1.0, busy=0.5, communication=0.18 if rank == 5 else 0.93) for rank in range(8)]
    first = render(ranks).splitlines()[0]
    assert first == "rank 5 is waited for: the others spend 93 % in communication, it 18 %"
    assert "waited for" not in render([Summary(rank, 1.0, communication=0.4) for rank in range(8)])
