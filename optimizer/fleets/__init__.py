"""Divides the devices of one fleet among several applications. Each is then planned on its devices as if it were alone.

A *division* gives every application its devices. On small fleets the planner plans every part of the fleet for every
application, and compares all divisions. On larger ones a linear program bounds all divisions; its solutions in whole
numbers are planned and corrected a few times.
"""
