"""Claim: the planner finds the best plan, and is fast enough."""
