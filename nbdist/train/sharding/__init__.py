"""Models in shards: device meshes, first values, what is gathered, and calls from outside their forward."""
