"""Load on a live server: workloads, an open-loop generator, and its report."""
