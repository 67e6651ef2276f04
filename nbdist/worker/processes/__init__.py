"""The processes that a rank starts or leaves behind."""
