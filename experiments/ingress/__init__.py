"""Measures what a request costs the front."""
