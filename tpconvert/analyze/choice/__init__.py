"""Which axes are cut, what they are called, and the plan that says so."""
