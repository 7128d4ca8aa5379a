"""Every model type of transformers, built small, planned, and held to the whole model."""
