"""The messages between the processes, by subject."""
