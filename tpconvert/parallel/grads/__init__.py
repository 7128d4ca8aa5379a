"""Gradients whose terms lie on several ranks: summed, and their norm."""
