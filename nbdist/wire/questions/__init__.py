"""Questions to ranks and their answers, by subject."""
