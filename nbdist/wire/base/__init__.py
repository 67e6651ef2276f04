"""What messages are made of: their bounds, ranks, keys, text of the system, values."""
