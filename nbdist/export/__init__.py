"""Turns a notebook into a script for torchrun. Reads files only: independent of sessions, kernels and torch."""
