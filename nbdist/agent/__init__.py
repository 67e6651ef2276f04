"""The node's process: keeps the warm template, owns the ranks and reads their pipes. Never imports torch."""
