"""The side inside the notebook kernel: sessions, magics, display."""
