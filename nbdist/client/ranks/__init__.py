"""A set of ranks at work: what runs on them, what they send, and who observes it."""
