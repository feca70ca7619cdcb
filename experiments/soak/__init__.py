"""Claim: in an hour of traffic and faults, no request is lost, no answer is wrong, and no process grows."""
