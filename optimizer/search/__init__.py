"""The exact search for one pipeline: options, bounds, labels, plan."""
