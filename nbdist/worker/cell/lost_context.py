"""Whether this process has lost its GPU: after a failed kernel CUDA answers every further call with the same error.

Goes by the type and the code of what torch raises, never by its text. Independent of cells.
"""

from __future__ import annotations

import sys
from typing import Any

from nbdist.metrics.node import device
from nbdist.shells import chain

# Codes of cudaError_t after which CUDA's documentation has the process end: "any further CUDA work will return the
# same error". https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_STICKY = {
    214: "uncorrectable memory error",
    220: "uncorrectable NVLink error",
    226: "contained memory error",
    700: "illegal memory access",
    702: "time-out of a kernel",
    709: "destroyed context",
    710: "device-side assert",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    717: "invalid address space",
    718: "invalid program counter",
    719: "failed kernel",
}
_OF_CODE = (700, 710, 716, 719)  # usually the fault of an index that is out of range


def advice(error: BaseException) -> str:
    """Return what an error means that comes with the loss of the GPU, and what to type; empty if it is not lost."""
    code = next((code for part in chain(error) if (code := _code(part))), 0) or _probe()
    if any(map(_is_of_cuda, chain(error))) and _has_fallen_off_the_bus():
        return (
            "the GPU of this rank has fallen off the bus: `nvidia-smi` and the kernel's log say more, and a reboot "
            "brings it back. What is in CPU memory can be pulled before `%distributed stop`; `%distributed start "
            "--gpus 0,2`, for example, goes on without that GPU."
        )
    if not code:
        return ""
    words = (
        f"this rank has lost its GPU (CUDA error {code}, {_STICKY[code]}): whatever it does there will fail, "
        "and its tensors on the GPU are gone. Type `%distributed restart` for fresh ranks (what is in CPU memory can "
        "be pulled before), or launch again."
    )
    if code not in _OF_CODE:
        return words
    return (
        f"{words} The usual cause is a label or an index that is out of range, and the line that is shown may be a "
        "later one: type `%env CUDA_LAUNCH_BLOCKING=1` first to see the right one, or run the batch on the CPU."
    )


def _code(error: BaseException) -> int:
    """Return the code of a CUDA error after which the GPU is lost; 0 for any other error."""
    code = getattr(error, "error_code", 0) if _is_of_cuda(error) else 0
    return code if code in _STICKY else 0


def _is_of_cuda(error: BaseException) -> bool:
    kind = getattr(sys.modules.get("torch"), "AcceleratorError", None)  # since torch 2.8
    return kind is not None and isinstance(error, kind)


def _has_fallen_off_the_bus() -> bool:
    """Return whether the driver has lost this process's GPU, of which CUDA reports only an unknown error."""
    if not device.uses_gpu():
        return False
    cuda: Any = sys.modules["torch.cuda"]
    try:
        own = device.uuid(cuda, device.in_use(cuda, int(cuda.current_device())))
    except Exception:  # torch refuses whatever it is asked now
        own = ""
    return device.is_lost(own)


def _probe() -> int:
    """Return the GPU's error now: libraries such as NCCL and cuBLAS raise their own. Does not wait."""
    if not device.uses_gpu():
        return 0
    cuda: Any = sys.modules["torch.cuda"]
    try:
        cuda.current_stream().query()
    except Exception as error:  # torch and drivers have raised several types for this
        return _code(error)
    return 0
