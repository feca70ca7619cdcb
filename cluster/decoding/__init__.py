"""Decoders in virtual time: what a plan makes of texts, and which plan is best."""
