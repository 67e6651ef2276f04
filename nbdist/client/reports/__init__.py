"""What ranks have done, as text: errors, deaths, stacks, collectives, logs."""
