"""Claims about the serving graph, on virtual devices."""
