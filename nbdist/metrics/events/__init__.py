"""What happens in training code: passes, steps, batches, evaluations, waits. Each is seen in one place."""
