"""What a request costs the front."""
