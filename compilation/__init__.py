"""Compiles programs for a GPU on a machine without one, and reads what they cost from the compiled text."""
