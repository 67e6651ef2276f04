"""The clients of a session: the one that drives it, its successor, and those who look at it from outside."""
