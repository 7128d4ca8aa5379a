"""How two models are run and compared: dtypes, modes, ties, and the bounds that errors are held to."""
