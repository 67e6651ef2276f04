"""Sessions that are saved to a folder, and started from it."""
