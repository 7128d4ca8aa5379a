"""What ops do to the dims of their operands: rules as data, and as functions."""
