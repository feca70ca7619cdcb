"""Claim: a plan changes while requests flow, and no request notices."""
