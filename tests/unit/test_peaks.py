"""The peak of a device is the maker's dense figure for exactly this device, an estimate that says so, or not known."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nbdist.errors import UsageError
from nbdist.metrics.compute.formulas import arithmetic
from nbdist.metrics.rates import matmul_rate, peaks
from nbdist.metrics.rates.peaks import Peak, estimate, in_tensor_cores, mixed, peak

BF16 = {  # of names as torch gives them
    "Tesla V100-SXM2-16GB": None,
    "Tesla T4": None,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA A30": 165,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA A100-SXM4-40GB": 312,
    "A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H20": 148,
    "NVIDIA H20-3e": 148,
    "NVIDIA B200": 2250,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "AMD Instinct MI250": 181,
    "NVIDIA GB200": 2500,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI325X": 1307,
    "AMD Instinct MI355X": 2500,
}
UNKNOWN = [
    *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA A100X"),
    *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40G", "NVIDIA A1000", "cpu", ""),
]


@pytest.mark.parametrize(("name", "tflops"), BF16.items())
def test_each_device_has_its_own_dense_figure(name: str, tflops: float | None) -> None:
    found = peak(name, "bfloat16")
    assert (found.tflops if found else None) == tflops
    assert found is None or (found.source and not found.estimated)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_only_looks_like_a_known_one_gives_nothing(name: str) -> None:
    assert peak(name, "bf16") is None


def test_dtypes_have_their_own_figures() -> None:
    figures = [peak("NVIDIA H100 80GB HBM3", dtype) for dtype in ("float32", "tf32", "fp16", "float8_e4m3fn")]
    assert [found.tflops for found in figures if found] == [67, 494.5, 989, 1979]
    assert peak("Tesla V100-SXM2-32GB", "half") == peak("Tesla V100-SXM2-16GB", "fp16")


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="fp32, tf32, fp16, bf16, fp8"):
        peak("NVIDIA H200", "int3")


@pytest.mark.parametrize(
    ("name", "capability", "sms", "clock", "dtype"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0), 80, 1.53e9, "fp16"),
        ("Tesla T4", (7, 5), 40, 1.59e9, "fp16"),
        ("NVIDIA A10", (8, 6), 72, 1.695e9, "bf16"),
        ("NVIDIA RTX A6000", (8, 6), 84, 1.8e9, "tf32"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41e9, "bf16"),
        ("NVIDIA L4", (8, 9), 58, 2.04e9, "bf16"),
        ("NVIDIA L40S", (8, 9), 142, 2.52e9, "bf16"),
        ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695e9, "bf16"),
        ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52e9, "fp8"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.83e9, "bf16"),
        ("NVIDIA B200", (10, 0), 148, 1.85e9, "bf16"),
        ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407e9, "bf16"),
        ("Tesla V100-SXM2-16GB", (7, 0), 80, 1.53e9, "fp64"),
        ("Tesla T4", (7, 5), 40, 1.59e9, "int8"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41e9, "int8"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41e9, "fp64"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98e9, "fp64"),
        ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52e9, "int8"),
        ("NVIDIA B200", (10, 0), 148, 1.85e9, "fp4"),
        ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407e9, "fp4"),
    ],
)
def test_the_estimate_agrees_with_the_table_within_two_percent(
    name: str, capability: tuple[int, int], sms: int, clock: float, dtype: str
) -> None:
    found, stated = estimate(name, capability, sms, clock, dtype), peak(name, dtype)
    assert found and stated and found.estimated and found.source.startswith("estimated")
    assert found.tflops == pytest.approx(stated.tflops, rel=0.02)


def test_nothing_is_estimated_for_an_architecture_that_is_not_known() -> None:
    assert estimate("NVIDIA Something", (99, 0), 100, 1e9, "bf16") is None
    assert estimate("NVIDIA A100-SXM4-40GB", (8, 0), 108, 0.0, "bf16") is None
    assert estimate("Tesla T4", (7, 5), 40, 1.59e9, "bf16") is None


def test_mixed_work_has_the_peak_of_its_parts_one_after_the_other() -> None:
    known = {"bf16": Peak(100, "a"), "fp32": Peak(10, "b")}
    assert mixed({"bf16": 7}, known) == known["bf16"]
    found = mixed({"bf16": 100, "fp32": 10}, known)
    assert found and found.tflops == 55.0
    assert mixed({"bf16": 100, "fp8": 1}, known) is None


def test_a_gpu_that_is_too_full_to_be_measured_is_told_with_what_helps() -> None:
    import torch

    assert matmul_rate.sizes_with_room(80 << 30, torch.bfloat16) == [2048, 4096, 8192, 16384]
    assert matmul_rate.sizes_with_room(500 << 20, torch.bfloat16) == [2048, 4096]
    with pytest.raises(UsageError, match=r"10.0 MiB free.*%distributed free"):
        matmul_rate.sizes_with_room(10 << 20, torch.bfloat16)


PRECISION = """
import torch
from nbdist.metrics.rates import matmul_rate, peaks

{choice}
before = torch.backends.cuda.matmul.fp32_precision
assert matmul_rate.measure(seconds=0.01).tflops > 0
assert torch.backends.cuda.matmul.fp32_precision == before
print(peaks.in_tensor_cores())
"""


@pytest.mark.parametrize(
    ("choice", "in_tensor_cores"),
    [
        ("", False),
        ("torch.set_float32_matmul_precision('high')", True),
        ("torch.backends.fp32_precision = 'tf32'", True),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", False),
    ],
)
def test_how_fp32_is_multiplied_is_known_and_left_as_it_was(choice: str, in_tensor_cores: bool) -> None:
    """In a process of its own: what is chosen with the newer names can't be asked for by the older ones."""
    script = PRECISION.format(choice=choice)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.stdout == f"{in_tensor_cores}\n", done.stderr


def test_a_mig_instance_has_its_share_of_the_card() -> None:
    found = estimate("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, 1.98e9, "bf16")
    assert found is not None and found.estimated and found.tflops == pytest.approx(989 * 16 / 132)
    assert estimate("NVIDIA H20 MIG 1g.12gb", (9, 0), 8, 1.98e9, "bf16") == Peak(
        148 * 8 / 78, "estimated: 8 of 78 SMs of a H20", estimated=True
    )
    assert estimate("NVIDIA H999 MIG 1g.10gb", (9, 0), 16, 1.98e9, "bf16") is None


def test_cards_without_tensor_cores_are_not_taken_for_those_with() -> None:
    found = estimate("NVIDIA GeForce GTX 1660", (7, 5), 22, 1.785e9, "fp16")
    assert found is not None and found.tflops == pytest.approx(10.05, rel=0.01)


def test_tf32_is_fp32_where_there_are_no_such_tensor_cores() -> None:
    found = peak("Tesla V100-SXM2-32GB", "tf32")
    assert found is not None and found.tflops == 15.7


def test_convolutions_and_rnns_have_switches_of_their_own() -> None:
    assert in_tensor_cores("conv") and in_tensor_cores("rnn") and not in_tensor_cores("matmul")
    gpu = torch.device("cuda", 0)
    assert [arithmetic(name, "float32", gpu) for name in ("aten.convolution", "aten._cudnn_rnn", "aten.mm")] == [
        "tf32",
        "tf32",
        "float32",
    ]


def test_what_is_measured_on_cuda_is_of_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on cuda:3, on a machine without GPUs."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(peaks, "measured_peaks", {})
    monkeypatch.setattr(peaks, "stated", lambda device, dtype: None)
    peaks.note(torch.device("cuda"), "bf16", 120.0)
    found = peaks.known(torch.device("cuda:3"), "bf16")
    assert found is not None and found.tflops == 120.0
