"""Claim: a small network before a large one answers sooner and more, at the promised accuracy."""
