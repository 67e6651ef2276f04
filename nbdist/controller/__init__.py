"""The session's router, in its own process: membership, routing, the output log. Never imports torch."""
