"""What ranks do together: collectives, agreement, turns."""
