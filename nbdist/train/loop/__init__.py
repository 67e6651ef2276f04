"""What runs in each step: backward, accumulation, the optimizer, precision."""
