"""What tests and benchmarks stand on: a real kernel, models, trainings, a driver without a GPU. Imports neither."""
