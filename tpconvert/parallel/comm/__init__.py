"""Where a rank stands, what ranks say to one another, and the random numbers that they share."""
