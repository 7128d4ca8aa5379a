"""Forwards made to run on parts: integer attributes divided, or the forward written anew."""
