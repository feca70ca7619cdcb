"""The deployer process: it starts the replicas of a plan, and leads every front from one plan to the next."""
