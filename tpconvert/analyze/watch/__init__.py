"""What recording has to see besides torch functions: hooks, state, gradients, code below them."""
