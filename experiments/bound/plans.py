"""Whether plans keep their promise, and whether a baseline or a plan close by is better, by the simulator.

Problems are played until the time is over, on all cores. The next run goes on with those that are left: what was found
is kept as long as the code stays the same.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import isfinite
from typing import NamedTuple

import numpy as np
from rich.progress import track

from cluster.commands.plan_result import PLAYED_GAP
from cluster.simulator.playing import HOPE, PATIENT, is_playable, played
from cluster.simulator.simulation import World
from cluster.simulator.sustained import SHORT_SLOS, kept_run, settled
from deployments.folders import cache_directory
from experiments.bound.problems import playable
from experiments.shared.version import code_behind
from optimizer.effort import MOST_GAP
from optimizer.objective import Objective
from optimizer.pipelines.baselines import baselines
from optimizer.pipelines.side_by_side import side_by_side
from optimizer.plan import Plan
from optimizer.problem import Problem

PROBLEMS, MINUTES = 500, 8
SEED = 7  # of inputs that no plan was chosen by
INPUTS, SLOS = 20_000, 60  # of a run at least
BEATEN = 0.02  # a baseline is better if it sustains this share more
GAP = 0.01  # of the planner, as the product's controller asks for it
FIND = partial(side_by_side, gap=PLAYED_GAP)
MOVED, MOVING_S = 6, 20.0  # problems whose plans' neighbours are played, and for how long each


class JudgedPlan(NamedTuple):
    """One problem's plan. Rates are what the simulator sustains; `error` is of the promise, as a share of it."""

    seed: int
    promised_per_s: float
    sustained_per_s: float
    error: float
    gap: float
    beaten_by: str  # a baseline, or nothing
    seconds: float  # that planning took


@dataclass(frozen=True)
class Until:
    """Whether the time is over, on a clock that all processes share."""

    at_s: float

    def __call__(self) -> bool:
        return time.time() >= self.at_s


def measure(problems: int = PROBLEMS, minutes: int = MINUTES, moved: int = MOVED) -> dict[str, float]:
    with ProcessPoolExecutor(os.cpu_count()) as cores:
        near = track(cores.map(neighbour_gain, range(moved)), "neighbours", total=moved)
        gains = [gain for gain in near if gain is not None]
        found = judged(range(problems), Until(time.time() + 60 * minutes), cores)
    errors = np.abs([each.error for each in found])
    return {
        "planned": len(found),
        "promise_error_p50": float(np.quantile(errors, 0.5)),
        "promise_error_p90": float(np.quantile(errors, 0.9)),
        "promise_error_max": float(errors.max()),
        "promise_kept_p10": float(np.quantile([1 + each.error for each in found], 0.1)),
        "beaten_by_baseline": sum(each.beaten_by != "" for each in found),
        "gap_finite": float(np.mean([isfinite(each.gap) and each.gap < MOST_GAP for each in found])),
        "plan_s_p50": float(np.quantile([each.seconds for each in found], 0.5)),
        "plan_s_max": max(each.seconds for each in found),
        **({"best_neighbour_p90": float(np.quantile(gains, 0.9))} if gains else {}),
    }


def judged(seeds: Sequence[int], out_of_time: Until, cores: Executor) -> list[JudgedPlan]:
    """Those of these problems that this code has judged, now or in a run before."""
    code = sha256(json.dumps(code_behind("experiments/bound/plans.py")).encode()).hexdigest()[:16]
    kept = cache_directory() / "bench-bound" / f"{code}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    before = [JudgedPlan(*each) for each in json.loads(kept.read_text())] if kept.exists() else []
    found = {each.seed: each for each in before}
    left = [seed for seed in seeds if seed not in found]
    judge_one = partial(judge, out_of_time=out_of_time)
    for each in track(cores.map(judge_one, left), f"plans ({len(found)} were judged before)", total=len(left)):
        if each:
            found[each.seed] = each
            kept.write_text(json.dumps(list(found.values())))
    return [found[seed] for seed in seeds if seed in found]


def judge(seed: int, out_of_time: Until) -> JudgedPlan | None:
    """None: no plan, or no time."""
    problem = None if out_of_time() else playable(seed)
    if problem is None:
        return None
    began_s = time.perf_counter()
    plan = planned(*problem)
    seconds = time.perf_counter() - began_s
    if plan is None or plan.promise is None:
        return None
    facts, objective = problem
    assert objective.slo_s
    promised = plan.promise.goodput_per_s
    kept = settled(World(plan, facts, objective.slo_s), promised, INPUTS, SEED, SLOS)
    beaten_by = next(better(facts, objective, kept * (1 + BEATEN)), "")
    return JudgedPlan(seed, promised, kept, kept / promised - 1, plan.promise.gap, beaten_by, seconds)


def planned(facts: Problem, objective: Objective) -> Plan | None:
    """What `isobatch plan` answers."""
    plan = side_by_side(facts, objective, GAP)
    if plan is None or not is_playable(plan, facts, objective):
        return plan
    return played(plan, facts, objective, FIND).plan


def neighbour_gain(seed: int) -> float | None:
    """How much more the best plan sustains that is found close by."""
    problem = playable(seed)
    plan = planned(*problem) if problem else None
    if problem is None or plan is None:
        return None
    care = replace(PATIENT, slos=SLOS, out_of_time=Until(time.time() + MOVING_S))
    return played(plan, *problem, FIND, care).gain


def better(facts: Problem, objective: Objective, rate_per_s: float) -> Iterator[str]:
    """The baselines that sustain this rate: planned with the same care, or with none."""
    for asked in (objective, Objective(slo_s=objective.slo_s, slack=0.0, max_batch=objective.max_batch)):
        for other in baselines(facts, asked):
            if other.plan and other.score and other.score.goodput_per_s * HOPE > rate_per_s > 0:
                world = World(other.plan, facts, asked.slo_s or 0.0)
                counts = (max(INPUTS, int(slos * world.slo_s * rate_per_s)) for slos in (SHORT_SLOS, SLOS))
                kept = all(kept_run(world, rate_per_s, each, SEED) for each in counts)
                if kept and settled(world, rate_per_s, INPUTS, SEED, SLOS) >= rate_per_s:
                    yield other.name
