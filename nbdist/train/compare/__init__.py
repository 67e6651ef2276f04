"""Whether ranks hold the same, and making it so."""
