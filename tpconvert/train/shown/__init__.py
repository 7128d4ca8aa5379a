"""What a run shows of itself."""
