"""Judges problem after problem, each in every respect, until the time is over.

The next run goes on with the problems that are left: what was found is kept as long as the code stays the same.
"""

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import astuple, dataclass
from functools import partial
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from rich.progress import track

from deployments.folders import cache_directory
from experiments.bound.admitted import Replayed, replayed
from experiments.bound.plans import JudgedPlan, judge
from experiments.shared.version import code_behind
from optimizer.effort import MOST_GAP


class JudgedProblem(NamedTuple):
    """What was found of one problem: its plan, if it has one, and who was refused of another's inputs."""

    seed: int
    plan: JudgedPlan | None
    replayed: Replayed


@dataclass(frozen=True)
class Until:
    """Whether the time is over, on a clock that all processes share."""

    at_s: float

    def __call__(self) -> bool:
        return time.time() >= self.at_s


def judged(seeds: Sequence[int], out_of_time: Until, cores: Executor) -> list[JudgedProblem]:
    """Those of these problems that this code has judged, now or in a run before."""
    code = sha256(json.dumps(code_behind("experiments/bound/judged.py")).encode()).hexdigest()[:16]
    kept = cache_directory() / "bench-bound" / f"{code}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    result = {each.seed: each for each in map(_read, json.loads(kept.read_text()) if kept.exists() else ())}
    left = [seed for seed in seeds if seed not in result]
    judge_one = partial(_judge, out_of_time=out_of_time)
    for each in track(cores.map(judge_one, left), f"problems ({len(result)} were judged before)", total=len(left)):
        if each:
            result[each.seed] = each
            kept.write_text(json.dumps([(*one[:2], astuple(one.replayed)) for one in result.values()]))
    return [result[seed] for seed in seeds if seed in result]


def figures(result: Sequence[JudgedProblem]) -> dict[str, float]:
    """Of all these problems."""
    plans = [each.plan for each in result if each.plan]
    errors = np.abs([plan.error for plan in plans])
    gains = [plan.neighbour_gain for plan in plans if plan.neighbour_gain is not None]
    inputs = sum((each.replayed for each in result), Replayed())
    gained, gained_error = _gained(each.replayed for each in result)
    return {
        "problems": len(result),
        "planned": len(plans),
        "promise_error_p50": float(np.quantile(errors, 0.5)),
        "promise_error_p90": float(np.quantile(errors, 0.9)),
        "promise_error_max": float(errors.max()),
        "promise_kept_p10": float(np.quantile([1 + plan.error for plan in plans], 0.1)),
        "beaten_by_baseline": sum(plan.beaten_by != "" for plan in plans),
        "gap_finite": float(np.mean([isfinite(plan.gap) and plan.gap < MOST_GAP for plan in plans])),
        "plan_s_p50": float(np.quantile([plan.seconds for plan in plans], 0.5)),
        "plan_s_max": max(plan.seconds for plan in plans),
        **({"neighbours": len(gains), "best_neighbour_p90": float(np.quantile(gains, 0.9))} if gains else {}),
        "refused_though_in_time": inputs.in_time / inputs.replayed if inputs.replayed else 0.0,
        "gained_by_letting_in": gained,
        "gained_by_letting_in_error": gained_error,
        "late_admitted": inputs.late / inputs.admitted,
        "refused_replayed": inputs.replayed,
    }


def _gained(problems: Iterable[Replayed]) -> tuple[float, float]:
    """How many more inputs are in time for each that is let in, and the standard error of that."""
    counts = np.array([(each.gained, each.replayed) for each in problems])
    gained, replays = counts.sum(axis=0)
    if not replays:
        return 0.0, 0.0
    mean = gained / replays
    return float(mean), float(np.sqrt(((counts[:, 0] - mean * counts[:, 1]) ** 2).sum()) / replays)


def _read(kept: Sequence[Any]) -> JudgedProblem:
    seed, plan, inputs = kept
    return JudgedProblem(seed, JudgedPlan(*plan) if plan else None, Replayed(*inputs))


def _judge(seed: int, out_of_time: Until) -> JudgedProblem | None:
    """None: no time."""
    return None if out_of_time() else JudgedProblem(seed, judge(seed), replayed(seed))
