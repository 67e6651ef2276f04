"""What is written down of a run: trackers, tables, logs."""
