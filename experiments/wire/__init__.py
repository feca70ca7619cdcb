"""What it costs to fetch survivors: our connections beside maintained ones."""
