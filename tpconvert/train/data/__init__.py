"""Which rows, in which order, on which rank, in which batches."""
