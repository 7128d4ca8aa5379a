"""Models of transformers: where they lie, what class they are, what their weights are made of."""
