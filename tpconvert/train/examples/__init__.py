"""From raw examples to rows of numbers: what is learned from them, and whether they fit the model."""
