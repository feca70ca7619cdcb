"""Sends orders, replies and batches between fronts and replicas, and from replica to replica."""
