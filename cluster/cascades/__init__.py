"""Times, plans and simulates combinations of networks, so that the best one can be taken."""
