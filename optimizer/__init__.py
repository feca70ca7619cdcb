"""What to run where: pure planning, with no clock, no network and no cluster."""
