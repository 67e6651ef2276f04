"""What ranks print and show, merged and drawn below the cell."""
