"""State on disk: what is kept, how it is written, and how it is found again."""
