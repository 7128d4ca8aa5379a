"""What ranks say to one another, and how they end together."""
