"""What is in a notebook, as text and trees: its file, its code, plain Python for IPython's. Decides nothing."""
