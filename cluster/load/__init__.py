"""Load on a running server: workloads, an open-loop generator, and its report."""
