"""Models cut into stages: which they are, how a model is cut, and how batches pass through them."""
