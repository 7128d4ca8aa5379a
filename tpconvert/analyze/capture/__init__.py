"""A forward run once and written down, op by op."""
