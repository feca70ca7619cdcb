"""From one plan to the next: the deployer brings replicas to life and leads every front, without losing a request."""
