"""Claim: if any process dies, every admitted request is answered, and service recovers by itself."""
