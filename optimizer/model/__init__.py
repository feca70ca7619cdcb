"""What a plan costs: every belief about hardware, and the evaluation of a finished plan."""
