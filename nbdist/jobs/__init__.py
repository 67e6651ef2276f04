"""A look into jobs that others have started: which there are on this machine, and what their ranks do."""
