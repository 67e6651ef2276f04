"""What leaves a rank: its text, its displays, its widgets."""
