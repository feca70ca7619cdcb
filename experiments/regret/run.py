"""Claim: the controller never makes it worse than the best fixed plan of the same devices.

In virtual time, real arrivals are replayed with the real controller and with every plan that it considered. Live, with
real compute, bursts come after a long calm, and some requests ask for the whole network. The control is the same load
on a plan that stays.
"""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.regret import judged
from experiments.regret.live import ROUNDS, Timing, live
from experiments.regret.replay import play
from experiments.regret.suite import TRACES, ReplayedTrace, recorded_per_s


def measure(
    parts: str = "sim,live", hours: int = 1, traces: str = ",".join(TRACES), percents: int | str = "5,30,90",
    only: str = "mixed,bursts,react", calm_s: int = 300, burst_s: int = 20, window_s: int = 60,
    rounds: int = ROUNDS,
) -> dict[str, float]:  # fmt: skip
    """Simulated: `hours` of these traces, whose busy windows ask for `percents` of what the first plan sustains.

    Live: `only` these parts, with a calm, bursts and windows of the controller of these seconds.
    """
    timing = Timing(float(calm_s), float(burst_s), float(window_s), rounds)
    measures: dict[str, Callable[[], dict[str, float]]] = {
        "sim": lambda: _simulated(traces.split(","), [int(each) for each in str(percents).split(",")], hours),
        "live": lambda: _live(timing, only),
    }
    return {name: value for part in parts.split(",") for name, value in measures[part]().items()}


def _simulated(traces: list[str], percents: list[int], hours: int) -> dict[str, float]:
    cases = [ReplayedTrace(trace, percent, hours) for trace in traces for percent in percents]
    for trace in traces:
        recorded_per_s(trace, hours)  # once, for all processes that begin as copies of this one
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        return judged.figures(play(cases, cores))


def _live(timing: Timing, only: str) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        return live(timing, only, Path(folder))
