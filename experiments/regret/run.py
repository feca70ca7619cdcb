"""Claim: the controller never makes it worse than the best fixed plan of the same devices.

In virtual time, real arrivals are replayed with the real controller and with every plan that it considered.
"""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from experiments.regret import judged
from experiments.regret.replay import play
from experiments.regret.suite import TRACES, Case


def measure(
    parts: str = "sim", hours: int = 4, traces: str = ",".join(TRACES), percents: int | str = "5,30,90"
) -> dict[str, float]:
    """`percents`: what the busy windows of a trace ask for, of what the first plan sustains. The live part also takes a while."""
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "sim": lambda: simulated(traces.split(","), [int(each) for each in str(percents).split(",")], hours),
    }
    return {name: value for part in parts.split(",") for name, value in measures[part]().items()}


def simulated(traces: list[str], percents: list[int], hours: int) -> dict[str, float]:
    cases = [Case(trace, percent, hours) for trace in traces for percent in percents]
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        return judged.figures(play(cases, cores))
