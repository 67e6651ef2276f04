"""Stand-ins for the NVIDIA driver, CUDA and NCCL."""
