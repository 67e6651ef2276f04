"""What tests stand on: kernels, sessions, models, cells that are odd."""
