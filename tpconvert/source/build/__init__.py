"""Modules built without their weights, or with drawn ones, here and in other processes."""
