"""What a plan would need, found by a trial without memory."""
