"""What is typed: magics, their lines, completion."""
