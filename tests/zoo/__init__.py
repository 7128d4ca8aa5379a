"""Tiny vanilla modules in the many forms people write, none from transformers."""
