"""Several applications on one fleet: which devices each gets. Its plan on these devices is made as for one alone.

A *division* gives every application its devices. On small fleets the planner plans every part of the fleet for every
application, and the best division is found among all. On larger ones a linear program bounds every division, and its
whole numbers are planned and corrected a few times.
"""
