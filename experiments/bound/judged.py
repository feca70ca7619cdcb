"""Judges one problem after another until the time is over.

The next run continues with the other problems. Results are kept while the code stays the same.
"""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.progress import track

from experiments.bound.hindsight import LOADS, Hindsight
from experiments.bound.plans import JudgedPlan, judge
from experiments.shared.kept_parts import place_of
from isobatch.profiles.files import write_whole


@dataclass(frozen=True)
class Until:
    """Whether the time is over, on a clock that all processes share."""

    at_s: float

    def __call__(self) -> bool:
        return time.time() >= self.at_s


def judged(seeds: Sequence[int], out_of_time: Until, cores: Executor) -> dict[int, JudgedPlan | None]:
    """The problems that this code has judged, now or in earlier runs; None: the problem has no plan."""
    kept = place_of("bound", module="judged").with_suffix(".json")
    kept.parent.mkdir(parents=True, exist_ok=True)
    found = {int(seed): _read(each) for seed, each in (json.loads(kept.read_text()) if kept.exists() else {}).items()}
    left = [seed for seed in seeds if seed not in found]
    judge_one = partial(_judge, out_of_time=out_of_time)
    done = cores.map(judge_one, left)
    for seed, each in zip(left, track(done, f"problems ({len(found)} were judged before)", len(left)), strict=True):
        if each:
            found[seed] = each[0]
            write_whole(kept, json.dumps(found))
    return {seed: found[seed] for seed in seeds if seed in found}


def figures(found: dict[int, JudgedPlan | None]) -> dict[str, float]:
    """The figures of all these problems together."""
    plans = [each for each in found.values() if each]
    errors = np.abs([plan.error for plan in plans])
    gains = [plan.neighbour_gain for plan in plans if plan.neighbour_gain is not None]
    return {
        "problems": len(found),
        "promise_error_p90": float(np.quantile(errors, 0.9)),
        "promise_error_max": float(errors.max()),
        "beaten_by_baseline": sum(plan.beaten_by != "" for plan in plans),
        "plan_s_p50": float(np.quantile([plan.seconds for plan in plans], 0.5)),
        "plan_s_max": max(plan.seconds for plan in plans),
        **({"best_neighbour_p90": float(np.quantile(gains, 0.9))} if gains else {}),
        **dict(_hindsight_figures(plans)),
        **dict(_oracle_figures(plans)),
    }


def _hindsight_figures(plans: Sequence[JudgedPlan]) -> Iterator[tuple[str, float]]:
    """Gains are at least 0, since the product's rule is one of the rules."""
    for number, load in enumerate(LOADS):
        at = [plan.hindsight[number] for plan in plans]
        name = f"{load:g}".replace(".", "_")
        yield f"hindsight_gain_{name}x", float(np.mean([max(0.0, each.gain) for each in at]))
        yield f"hindsight_gain_max_{name}x", max(each.gain for each in at)
        yield f"late_admitted_{name}x", float(np.mean([each.late for each in at]))


def _oracle_figures(plans: Sequence[JudgedPlan]) -> Iterator[tuple[str, float]]:
    """The share of the upper bound that plans sustain, by the restriction that costs most."""
    for why in sorted({plan.limited_by for plan in plans}):
        shares = [plan.share_of_oracle for plan in plans if plan.limited_by == why]
        yield f"share_of_oracle_where_{why.split(',')[0].replace(' ', '_')}", float(np.mean(shares))


def _read(kept: Sequence[Any] | None) -> JudgedPlan | None:
    if kept is None:
        return None
    plan = JudgedPlan(*kept)
    return plan._replace(hindsight=[Hindsight(*each) for each in plan.hindsight])


def _judge(seed: int, out_of_time: Until) -> list[JudgedPlan | None]:
    """The judged plan; an empty list: the time was over."""
    return [] if out_of_time() else [judge(seed)]
