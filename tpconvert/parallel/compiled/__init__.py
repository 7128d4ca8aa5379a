"""Compiled layers and recorded steps, and what runs beside what in them."""
