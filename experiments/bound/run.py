"""Claim: promises are kept, no baseline is better, hindsight admits hardly better, and most of what is possible
is sustained.

Problems are drawn: networks and fleets that are made up, and the paper's networks. What a plan sustains is simulated on
inputs that it was not chosen by. Controls: the baselines, planned with the same care and with none; plans close by;
five rules of admission, the best of which is chosen in hindsight; and the rate that no system can exceed.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor

from experiments.bound.judged import Until, figures, judged
from experiments.bound.plans import share_of_oracle
from experiments.shared.gains import MIXED, ONE_KIND

PROBLEMS, MINUTES = 120, 38


def measure(problems: int = PROBLEMS, minutes: int = MINUTES, oracle: int = 1) -> dict[str, float]:
    """So many problems, as far as the minutes go."""
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        result = figures(judged(range(problems), Until(time.time() + 60 * minutes), cores))
        if oracle:
            one, mixed = cores.map(share_of_oracle, (ONE_KIND, MIXED))
            result |= {"share_of_oracle_homogeneous": one, "share_of_oracle_mixed": mixed}
    return result
