"""Claim: the controller never makes it worse."""
