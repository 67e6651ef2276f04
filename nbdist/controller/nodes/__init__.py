"""The nodes of a session: who has come, which ranks are there, and values on their way between them."""
