"""Where memory goes: high-water marks, tensors, what to say when it runs out."""
