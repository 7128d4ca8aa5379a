"""What a run writes to go on from, and which of it stays."""
