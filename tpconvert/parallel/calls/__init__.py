"""What is put around a module's own forward, or in its place."""
