"""What cells cost: memory, steps, history. Observes sessions, which don't depend on it."""
