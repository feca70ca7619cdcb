"""Claim: plans keep their promises, and neither baselines nor admission in hindsight are much better."""
