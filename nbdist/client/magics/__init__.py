"""The user's commands: magics, their lines, completion."""
