"""What a terminal shows while a command runs, and what it is told of a mistake."""
