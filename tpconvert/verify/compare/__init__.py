"""The whole model and the converted one, run side by side."""
