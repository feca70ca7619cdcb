"""Claim: whatever dies, what was admitted is answered, and service recovers by itself."""
