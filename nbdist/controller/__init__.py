"""The session's router, a process of its own: membership, routing, the output log. Never imports torch."""
