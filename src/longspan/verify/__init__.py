"""Runs the same batch two ways and compares; every check has a negative control."""
