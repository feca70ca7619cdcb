"""The dispatcher and its parts. Pure: no I/O, no clock, no Ray."""
