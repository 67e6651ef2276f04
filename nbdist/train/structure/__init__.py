"""What a model is made of: its blocks, its shards, how they are stored."""
