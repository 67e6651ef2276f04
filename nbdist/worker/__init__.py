"""The inside of a rank: its shell, its control thread, its process group."""
