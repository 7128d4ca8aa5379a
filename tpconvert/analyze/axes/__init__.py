"""Which dims of which tensors are the same axis, and how an axis is dealt to ranks."""
