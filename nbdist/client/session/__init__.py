"""Ranks at work for a notebook: the session, its cells, and what travels to and from the controller."""
