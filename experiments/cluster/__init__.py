"""Several nodes: faults of nodes and of the network between them, and fronts that share the work."""
