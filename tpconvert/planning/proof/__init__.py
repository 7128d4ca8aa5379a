"""The proof of a plan: every rank runs in the planned shapes, in every way the model is run."""
