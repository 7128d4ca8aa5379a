"""What a step does besides forward and backward."""
