"""Magic lines and their flags, parsed. Independent of sessions."""
