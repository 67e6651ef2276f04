"""What cells cost: memory, steps, history. Watches sessions, which know nothing of it."""
