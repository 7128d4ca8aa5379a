"""Other calls of a model than the one that it is planned for."""
