"""How fast a device is: as its maker states it, and measured."""
