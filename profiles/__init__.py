"""Measurements: latencies, exits and devices; and the forecast of the next window."""
