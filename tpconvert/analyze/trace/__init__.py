"""What a recorded forward is: its graph, its calls, and the sizes that remember where they came from."""
