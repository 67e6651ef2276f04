"""What tests and benchmarks share. Imports neither.

kernel                     a real kernel as a user has it
nvml                       the driver's library without a GPU, and the evidence that the real one behaves like that
closed_forms               models whose FLOPs are known
train_estimate             models whose memory is estimated, and what a step takes
gpu_programs, gpu_sharing  trainings for GPUs, and ranks that share one
resilience                 a training that is interrupted at random
"""
