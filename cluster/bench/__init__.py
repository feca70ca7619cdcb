"""Measures the gain of constant batches on one device without Ray, with real inputs or a given survival."""
