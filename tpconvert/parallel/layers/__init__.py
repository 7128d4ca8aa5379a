"""Layers over parts of parameters, the products in them, and the loss over a cut vocabulary."""
