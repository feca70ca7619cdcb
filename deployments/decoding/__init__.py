"""Decoders that write token by token, with early exits, at full batches (docs/decoding.md)."""
