"""What could be faster or smaller in a user's training, found by measuring it on the spot."""
