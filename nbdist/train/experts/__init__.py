"""What a plan does to the experts of a mixture: ranks divide each of them, or have some of them each."""
