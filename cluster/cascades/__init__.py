"""What a combination of networks would serve: timed, planned and simulated, so that the best can be taken."""
