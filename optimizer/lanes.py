"""Pipelines side by side: kinds of devices that do better apart than in one chain each take a share of the inputs.

Every block of a pipeline runs on one kind, so that a fleet of several kinds must be chained. Where links are slow or
kinds uneven, it is better to let some kinds work beside the others:

    most(S) = max( pace of the best pipeline on S,  max over T in S of pace of the best pipeline on T + most(S - T) )

over sets of kinds; a kind belongs to one pipeline. A ceiling (optimizer/ceiling.py) bounds the sum for any number of
pipelines, also for ones that share a kind, so that most sets need never be looked at.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np

from optimizer.baselines import baselines
from optimizer.ceiling import Ceiling
from optimizer.dp import search
from optimizer.evaluate import evaluate
from optimizer.objective import Objective
from optimizer.plan import Plan, Promise
from optimizer.problem import Problem
from optimizer.spread import best_of, spread, value

Kinds = frozenset[int]
ALL_SETS = 4  # with more kinds than this, only single ones, pairs and the whole fleet are chained


@dataclass(frozen=True)
class Lanes:
    """Some pipelines on kinds of their own."""

    plans: tuple[Plan, ...]

    @property
    def pace(self) -> float:
        return sum(plan.promise.goodput_per_s for plan in self.plans if plan.promise)

    @property
    def most(self) -> float:
        """What better ones might sustain, as far as is proved."""
        return sum(plan.promise.goodput_per_s * (1 + plan.promise.gap) for plan in self.plans if plan.promise)


def side_by_side(facts: Problem, objective: Objective, gap: float = 0.0) -> Plan | None:
    """The best pipelines, one or several: the fastest one, with the others `beside` it."""
    if len(facts.devices) == 1:
        return search(facts, objective, gap)
    plain = objective.arrivals_per_s is None and objective.cost_per_hour is None
    return (
        _most_goodput(facts, objective, gap)
        if objective.goal == "goodput" and plain
        else _any_goal(facts, objective, gap)
    )


def _any_goal(facts: Problem, objective: Objective, gap: float) -> Plan | None:
    """One pipeline, or kinds side by side that are used up one after the other; never worse than a baseline."""
    one = search(facts, objective, gap)
    others = [spread(facts, objective, partial(search, gap=gap)), *(each.plan for each in baselines(facts, objective))]
    best = best_of([one, *others], facts, objective)
    if best is None or best is one:
        return best
    bound = Ceiling(facts, objective, np.zeros(len(facts.devices))).bound(gap)
    score = evaluate(best, facts, objective)
    loss = value(best, facts, objective) / max(bound, 1e-300) - 1
    return replace(best, promise=Promise(score.goodput_per_s, score.latency_s, score.cost_per_hour, max(0.0, loss)))


def _most_goodput(facts: Problem, objective: Objective, gap: float) -> Plan | None:
    """Of every set of kinds in turn, as long as the prices leave room for more."""
    alone = replace(objective, goodput_per_s=0.0)
    all_kinds = frozenset(range(len(facts.devices)))
    found: dict[Kinds, Lanes] = {}
    least = 0.0
    for kinds in _sets(len(facts.devices)):
        if len(kinds) == 2 and not least:
            paces = [found[each].most if (each := frozenset({kind})) in found else 0.0 for kind in sorted(all_kinds)]
            least = Ceiling(facts, alone, np.array(paces)).bound(gap)
        most = _most(found, len(facts.devices))
        if least * max(most[all_kinds].pace * (1 + gap), 1e-300) >= 1:
            break
        apart = most[kinds].pace * (1 + max(gap, 1e-9))
        here = facts.with_devices([facts.devices[kind] for kind in sorted(kinds)])
        # What kinds can do together is bounded by the ceiling: chains need no proof of their own.
        plan = search(here, alone, gap, below=1 / apart if apart else np.inf, prove=len(kinds) == 1)
        if plan:
            found[kinds] = Lanes((plan,))
    lanes = _most(found, len(facts.devices))[all_kinds]
    if not lanes.plans or lanes.pace * (1 + 1e-9) < objective.goodput_per_s:
        return None
    return _joined(lanes, 1 / least if least else np.inf)


def _sets(kinds: int) -> Iterator[Kinds]:
    """Small sets first: they are quickly planned, and often enough."""
    sizes = range(1, kinds + 1) if kinds <= ALL_SETS else (1, 2, kinds)
    for size in sizes:
        yield from map(frozenset, combinations(range(kinds), size))


def _most(found: dict[Kinds, Lanes], kinds: int) -> dict[Kinds, Lanes]:
    """`most` of every set of kinds, from the pipelines found so far."""
    most: dict[Kinds, Lanes] = {frozenset(): Lanes(())}
    for kind in range(kinds):
        for rest in list(most):
            here = rest | {kind}
            choices = [
                Lanes((*found[taken].plans, *most[here - taken].plans)) for taken in found if kind in taken <= here
            ]
            most[here] = max([most[rest], *choices], key=lambda lanes: lanes.pace)
    return most


def _joined(lanes: Lanes, ceiling: float) -> Plan:
    first, *others = sorted(lanes.plans, key=lambda plan: plan.promise.goodput_per_s if plan.promise else 0.0)[::-1]
    promises = [plan.promise for plan in lanes.plans if plan.promise]
    goodput = sum(each.goodput_per_s for each in promises)
    gap = max(0.0, float(ceiling) / goodput - 1)
    promise = Promise(
        goodput,
        max(each.latency_s for each in promises),
        sum(each.cost_per_hour for each in promises),
        gap if gap > 1e-9 else 0.0,
    )
    return replace(first, promise=promise, beside=tuple(replace(each, promise=None) for each in others))
