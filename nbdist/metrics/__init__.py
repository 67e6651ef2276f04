"""What training costs: memory, FLOPs, time. Knows nothing of notebooks, sessions or the wire: it works anywhere."""
