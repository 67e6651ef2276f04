"""What tests share and benchmarks don't: sessions, models, cells that are odd."""
