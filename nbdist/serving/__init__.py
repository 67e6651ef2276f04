"""What a process of somebody else's job does so that its owner can look into it."""
