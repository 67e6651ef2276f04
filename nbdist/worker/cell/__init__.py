"""A cell on a rank: the shell that runs it, its interrupts, its failures."""
