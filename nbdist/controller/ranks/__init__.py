"""The sets of ranks of a session: how they come up, and how ranks are replaced and added."""
