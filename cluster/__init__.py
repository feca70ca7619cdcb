"""Keeping it right: the command line, and (later) the controller that re-plans."""
