"""Sequence parallelism: which values between cut regions may be slices of the tokens."""
