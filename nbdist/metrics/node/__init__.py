"""What a machine and its GPUs report."""
