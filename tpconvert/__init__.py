"""Automatic tensor parallelism for any PyTorch model, proved equal."""
