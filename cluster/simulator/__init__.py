"""The simulator runs the product's own dispatcher in virtual time."""
