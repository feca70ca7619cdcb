"""Claim: for as long as it runs, nothing is lost, no answer is wrong, and no process grows."""
