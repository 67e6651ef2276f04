"""The cells of a session: how they begin and are watched, stopped, and repaired."""
