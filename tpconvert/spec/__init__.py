"""Plain data, standard library only: layouts, plans, manifests, recipes."""
