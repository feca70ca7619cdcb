"""Proving it: benchmarks and claims, each with the command that prints its figures."""
