"""What a plan costs: every assumption about hardware, and the evaluation of a finished plan."""
