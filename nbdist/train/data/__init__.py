"""Loaders: which rank reads what, in which order, and where to go on."""
