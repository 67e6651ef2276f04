"""Breakpoints of the notebook's page, on ranks: the kernel's own debugger, with the ranks behind it."""
