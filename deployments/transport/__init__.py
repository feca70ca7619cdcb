"""How orders, replies and batches travel between a front and its replicas, and from replica to replica."""
