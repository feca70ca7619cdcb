"""Several pipelines side by side, the baselines, and what no combination can exceed."""
