"""Measures what serving costs beside the devices (`HostCosts`), on the live graphs that are simulated later.

An answer has its waiting and computing time. The rest of its latency, by its number of launches, is the travel time of
a request and of a launch, and the front's work. The front's processor time, at rest and at two rates with different
fill of launches, gives its work.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
from scipy.optimize import nnls

from experiments.serve import measures
from isobatch.cluster.load.generator import LoadGenerator
from isobatch.cluster.load.workloads import Floats, arrivals
from isobatch.cluster.simulator.event_loop import HostCosts
from isobatch.optimizer.plan import Plan
from isobatch.profiles.files import Profile

APART = 2.0  # between lone requests, in times of a request on its devices, so that none meets another
LIGHT, HEAVY = 0.3, 0.8  # of the promise
NORMAL = 1.4826  # a normal variable's standard deviation over its median deviation


@dataclass(frozen=True)
class Account:
    """The figures that one answer reports of itself."""

    launches: int
    computed_s: float
    beside_s: float  # latency without computing and waiting


@dataclass(frozen=True)
class FrontCounts:
    """The front's counts since its start."""

    requests: int
    launches: int
    work_s: float
    at_s: float


@dataclass(frozen=True)
class ServerCosts:
    """The measurements on one server."""

    turns_s: Sequence[float]  # how much longer launches took than their table says
    accounts: Sequence[Account]  # under light load
    seen: Sequence[FrontCounts]  # between periods of different load, of which the first is rest


@dataclass(frozen=True)
class Calibration:
    host: HostCosts
    jitter: float  # the deviation of answers' times, as a share of their time on devices


def measured(url: str, plan: Plan, facts: Profile, per_s: float, seconds: float = 2.0) -> ServerCosts:
    """Measure one server, in about four times `seconds`. `per_s`: the promise of the plan."""
    turns_s = _turns_s(url, plan, facts)
    seen = [_seen(url)]
    time.sleep(seconds / 2)
    seen.append(_seen(url))
    accounts = _asked(url, arrivals("poisson", LIGHT * per_s, 1.5 * seconds, 1))
    seen.append(_seen(url))
    _asked(url, arrivals("poisson", HEAVY * per_s, seconds, 2))
    return ServerCosts(turns_s, accounts, [*seen, _seen(url)])


def _turns_s(url: str, plan: Plan, facts: Profile, count: int = 8) -> list[float]:
    """Excess times of the launches of lone requests, whose launches are known in every pipeline."""
    ways_s = [
        sum(
            float(facts.table(pipeline.placement_of(s).kind).block_times_s(1)[s.start : s.stop].sum())
            for s in pipeline.splits
        )
        for pipeline in plan.pipelines
    ]
    last = plan.splits[-1].stop - 1
    due_s = np.arange(count, dtype=np.float64) * APART * max(ways_s)
    accounts = _asked(url, due_s, measures.leaving_at(last))
    nearest_s = [min(ways_s, key=lambda way_s: abs(each.computed_s - way_s)) for each in accounts]
    return [(each.computed_s - way_s) / each.launches for each, way_s in zip(accounts, nearest_s, strict=True)]


def _asked(url: str, due_s: Floats, body: bytes = measures.DRAWN) -> list[Account]:
    answers: dict[int, bytes] = {}

    def note(index: int, answer: bytes) -> bool:
        answers[index] = answer
        return True

    record = asyncio.run(LoadGenerator(url, [body] * len(due_s), right=note).at(due_s))
    took_s = record.ended_s - record.due_s
    return [_account(answers[index], took_s[index]) for index in np.flatnonzero(record.status == 200).tolist()]


def _account(answer: bytes, took_s: float) -> Account:
    steps = json.loads(answer)["outputs"][0]["splits"]
    queued_s, computed_s = (sum(step[name] for step in steps) / 1e3 for name in ("queued_ms", "computed_ms"))
    return Account(len(steps), computed_s, took_s - queued_s - computed_s)


def _seen(url: str) -> FrontCounts:
    answers = measures.stats(url)
    launches = sum(split["launches"] for split in answers["splits"])
    work_s = sum(front["cpu_s"] for front in answers["fronts"])
    return FrontCounts(answers["requests"]["answered"], launches, work_s, time.monotonic())


def calibration(servers: Sequence[ServerCosts]) -> Calibration:
    """Fit the host's costs: travel time is the time of answers beside devices and the front's work.

    >>> counted = [(0, 0, 0.0, 0.0), (0, 0, 0.1, 4.0), (100, 90, 0.37, 8.0), (300, 150, 0.69, 12.0)]
    >>> seen = [FrontCounts(*each) for each in counted]
    >>> accounts = [Account(1, 0.06, 0.0045), Account(2, 0.09, 0.007)]
    >>> found = calibration([ServerCosts([0.0005], accounts, seen)])
    >>> found.host.model_dump()
    {'request_s': 0.0008, 'launch_s': 0.001, 'request_way_s': 0.0012, 'launch_way_s': 0.0015, 'turn_s': 0.0005}
    """
    accounts = [each for server in servers for each in server.accounts]
    request_s, launch_s = _work_s([pair for server in servers for pair in pairwise(server.seen)])
    numbers = sorted({each.launches for each in accounts})
    beside_s = {number: median(each.beside_s for each in accounts if each.launches == number) for number in numbers}
    more_s, once_s = np.polyfit(numbers, list(beside_s.values()), 1)
    turn_s = median(each for server in servers for each in server.turns_s)
    costs = dict(
        zip(HostCosts.model_fields, (request_s, launch_s, once_s - request_s, more_s - launch_s, turn_s), strict=True)
    )
    varies = median(abs(each.beside_s - beside_s[each.launches]) / each.computed_s for each in accounts)
    return Calibration(
        HostCosts(**{name: round(max(0.0, float(s)), 6) for name, s in costs.items()}), NORMAL * float(varies)
    )


def _work_s(stretches: Sequence[tuple[FrontCounts, FrontCounts]]) -> tuple[float, float]:
    """Seconds of the front's work for a request and for a launch; a front at rest works in proportion to time."""
    counted = [(b.requests - a.requests, b.launches - a.launches, b.at_s - a.at_s) for a, b in stretches]
    (request_s, launch_s, _), _ = nnls(np.array(counted, float), [b.work_s - a.work_s for a, b in stretches])
    return float(request_s), float(launch_s)
