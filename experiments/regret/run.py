"""Claim: the controller sustains as much of real traffic as the best of the plans that it could have kept.

In virtual time, recorded arrivals are replayed with the real controller, while the mix of inputs drifts, and with each
plan that stays. The control is the plan with the most answers in time over the whole run, which is known afterwards.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from statistics import mean

from experiments.regret.replay import play
from experiments.regret.suite import TRACES, ReplayedTrace, recorded_per_s


def measure(hours: int = 1, percents: int | str = "30,90") -> dict[str, float]:
    """`hours` of each trace, whose busy windows ask for `percents` of what the first plan sustains."""
    shares = [int(each) for each in str(percents).split(",")]
    cases = [ReplayedTrace(trace, percent, hours) for trace in TRACES for percent in shares]
    for trace in TRACES:
        recorded_per_s(trace, hours)  # once, for all processes that begin as copies of this one
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        regrets = play(cases, cores)
    by_case = {f"regret_{name}": regret for name, regret in regrets.items()}
    return {"regret_mean": mean(regrets.values()), "regret_worst": max(regrets.values()), **by_case}
