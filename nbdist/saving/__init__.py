"""What a session leaves on the disk and comes back from: the names of each rank, its training, and its cells."""
