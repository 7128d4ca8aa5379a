"""A plan in the words of others: a transformers ``tp_plan``, a ``parallelize_module`` plan, and theirs read back."""
