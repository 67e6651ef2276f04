"""Models in shards: first values, what is gathered, and calls from outside their forward."""
