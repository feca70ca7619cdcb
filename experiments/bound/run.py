"""Claim: plans keep their promises and sustain most of an upper bound; no baseline and no admission is much better.

Problems are random networks and fleets, and the paper's networks. Plans are simulated on inputs by which they were not
chosen. The controls are baselines with simulated and with estimated plans, neighbouring plans, the best of five rules
of admission in hindsight, and an upper bound on the rate of any system.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor

from experiments.bound.judged import Until, figures, judged
from experiments.bound.plans import share_of_oracle
from experiments.shared.gains import MIXED, ONE_KIND

PROBLEMS, MINUTES = 120, 38


def measure(problems: int = PROBLEMS, minutes: int = MINUTES, oracle: int = 1) -> dict[str, float]:
    """Judge this number of problems, or as many as the minutes allow."""
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        result = figures(judged(range(problems), Until(time.time() + 60 * minutes), cores))
        if oracle:
            one, mixed = cores.map(share_of_oracle, (ONE_KIND, MIXED))
            result |= {"share_of_oracle_homogeneous": one, "share_of_oracle_mixed": mixed}
    return result
