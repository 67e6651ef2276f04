"""How the ranks of a session start: options, machines, the controller's process and the connection to it."""
