"""What a rank answers at any time, also while a cell runs: its control thread, and questions that take a while."""
