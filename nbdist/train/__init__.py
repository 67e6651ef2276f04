"""What training code on a rank calls. Knows nothing of notebooks, sessions or the wire: it works under torchrun too."""
