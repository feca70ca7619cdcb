"""What was measured: exits, latencies, devices; and what is expected of the next window."""
