"""Programs that run for minutes or hours and look for what a test would not find; each takes a seed."""
