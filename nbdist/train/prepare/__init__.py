"""`prepare`: a model, optimizers and loaders made ready for a plan."""
