"""What the rooms of the controller share: its socket, its questions to ranks, the log of their output."""
