"""What ranks print and display, merged and shown below the cell."""
