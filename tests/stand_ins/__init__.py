"""Stand-ins for what needs an NVIDIA GPU. Tests use no others, except the driver's library: `testbed.nvml`.

cuda       torch.cuda: an allocator behind a lock that is waited for with the GIL, sticky errors
streams    streams that run in any order, each with memory of its own
spinning   calls that wait for a kernel as CUDA does
nccl       ProcessGroupNCCL: abort that blocks, the watchdog; in one process, and in real ranks over gloo
heartbeat  the heartbeat of NCCL's watchdog, and the monitor that ends the process without it, compiled
driver     CUDA's driver before and after cuInit, compiled
sysfs      what Linux says of a GPU's place
guard      a torch that takes itself for one with CUDA, and libraries that initialize it

`native` compiles those that are compiled.

Each says what it does that a naive one would not, and who says that the real one does: a file of torch's, a page of
NVIDIA's, an issue. None does what the real one never does: tests/unit/test_cuda_build.py compares names and errors
with a torch that is built for CUDA. What could not be known is said to be so. torch's sources are those of 2.13.
"""
