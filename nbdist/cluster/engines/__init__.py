"""What starts nodes on other machines, and ends them."""
