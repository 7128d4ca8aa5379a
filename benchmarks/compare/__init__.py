"""One training step of one model in many ways, each in processes of its own."""
