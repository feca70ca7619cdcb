"""Claim: the controller sustains as much as the best fixed plan."""
