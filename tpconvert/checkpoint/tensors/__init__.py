"""Tensors by name: read lazily, made of others, taken in parts."""
