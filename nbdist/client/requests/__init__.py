"""What the ranks of a session can be asked for, besides running code."""
