"""Several pipelines side by side, the baselines, and upper bounds on the goodput of any combination."""
