"""What the dispatcher is made of: the route, the pools, the replicas, and the words it speaks."""
