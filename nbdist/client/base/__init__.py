"""What the rooms of the notebook's side share: results, options of a cell, Ctrl-C, answers of ranks."""
