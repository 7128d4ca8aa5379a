"""What a choice of axes makes of every value, forward and backward, and the collectives that follow."""
