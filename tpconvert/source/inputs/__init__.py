"""Example inputs for a model, found by what it documents and by running it."""
