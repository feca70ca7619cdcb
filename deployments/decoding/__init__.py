"""Decoders with early exits, at full batches."""
