"""Claim: a small network before a large one answers sooner and more, at what is promised of accuracy."""
