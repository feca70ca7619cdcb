"""A local Ray, and what is served on it: Serve files, deployment, capacity checks, clean shutdown."""
