"""Ranks at work for a notebook: the session, its cells, and the messages to and from the controller."""
