"""Process groups: joining them, watching them, cutting and renewing them."""
