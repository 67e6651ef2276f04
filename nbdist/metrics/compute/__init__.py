"""How floating-point operations, passes and steps are counted, and what a device could do."""
