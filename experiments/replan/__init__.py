"""Claim: a plan changes while requests flow, and nobody notices."""
