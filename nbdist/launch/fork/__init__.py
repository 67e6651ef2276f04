"""A launch on children of the notebook's own process."""
