"""The planner against brute force, against its own bounds, and against the clock."""
