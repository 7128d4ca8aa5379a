"""What a file that people may edit must be before anything is made of it, each fault told by its place."""
