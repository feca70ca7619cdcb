"""What several claims share: a live application to measure, gains over baselines, public data, the headlines."""
