"""A launch over several nodes, and its restarts."""
