"""Tensors on disk: a folder of them as a lazy mapping, and the one way they are cut, joined and written."""
