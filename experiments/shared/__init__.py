"""Code that several claims share: a live application, networks, gains over baselines, public data, headlines."""
