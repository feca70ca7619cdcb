"""Measurements: latencies, exits and devices; and the forecast of the next window."""

if __name__ != "isobatch.profiles":  # under a second name, each class would exist twice
    raise ImportError("profiles is a part of isobatch: import isobatch.profiles")
