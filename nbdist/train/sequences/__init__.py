"""Sequences of a batch divided among ranks: the model, its attention, its batches."""
