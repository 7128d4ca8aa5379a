"""The model of a run: opened, shared out, changed, and how much it computes and holds."""
