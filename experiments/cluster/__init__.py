"""Claim: nodes that fall silent cost no request, and two fronts fill batches as one front does."""
