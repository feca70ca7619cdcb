"""Profiles of a checkpoint: measured on this machine, or derived from datasheets."""
