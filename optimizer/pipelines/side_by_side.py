"""Pipelines side by side: kinds of devices that do better apart than in one chain each take a share of the inputs.

Every block of a pipeline runs on one kind, so a pipeline on several kinds chains them. Where links are slow or kinds
uneven, it is better to let some kinds work beside the others:

    most(S) = max( goodput of the best pipeline on S,
                   max over T in S of goodput of the best pipeline on T + most(S - T) )

over sets of kinds, where a kind belongs to one pipeline. After that, kinds may be shared (pipelines/sharing.py).
A ceiling (pipelines/ceiling.py) bounds the sum for any number of pipelines, also for ones that share a kind, so most
sets need not be planned at all.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from math import prod

import numpy as np

from isobatch.optimizer.effort import EFFORT, MOST_GAP, SAME, Effort, Ints
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import baselines
from isobatch.optimizer.pipelines.ceiling import Ceiling
from isobatch.optimizer.pipelines.sharing import Alone, Sharing, bound_per_s, by_itself, promised_per_s
from isobatch.optimizer.pipelines.spread import best_of, joined, spread, value
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search
from isobatch.profiles.devices import Device

Kinds = frozenset[int]
Pipelines = tuple[Plan, ...]  # on devices of their own
MOST_PARTS = 4_096  # numbers of devices of several pipelines that are compared
PARTS_TRIED = 20  # of them, since fewer devices may answer too late


def side_by_side(
    facts: Problem, objective: Objective, gap: float = 0.0, effort: Effort = EFFORT, known: Alone | None = None
) -> Plan | None:
    """The best pipelines, one or several: the one with the most goodput, with the others `beside` it.

    `known`: kinds by themselves, which were planned for the same question with other devices; others are added. It
    needs an objective without a goodput to reach, which fewer kinds by themselves would miss.
    """
    assert known is None or not objective.goodput_per_s
    known = {} if known is None else known
    if objective.cost_per_hour is not None:
        facts, objective = _in_whole_devices(facts, objective, objective.cost_per_hour)
        if not facts.devices:
            return None
    if len(facts.devices) == 1:
        return by_itself(facts.devices[0], facts, objective, gap, effort, known)
    if objective.aim.adds_up and objective.cost_per_hour is None:
        return _most_goodput(facts, objective, gap, effort, known)
    return _any_goal(facts, objective, gap, effort)


def _in_whole_devices(facts: Problem, objective: Objective, dollars: float) -> tuple[Problem, Objective]:
    """The devices of each kind that the limit pays, and as the limit the most that whole devices can cost.

    Bounds count parts of devices, so that they would spend the rest, too.
    """
    paid, spends, devices = dollars * (1 + SAME), np.zeros(1), list[Device]()
    for each in facts.devices:
        price = each.price_per_hour
        count = each.count if price * each.count <= paid else int(paid / price)
        if count:
            devices.append(replace(each, count=count))
        if price and len(spends) * (count + 1) <= MOST_PARTS:
            spends = np.unique(np.add.outer(spends, price * np.arange(count + 1)))
            spends = spends[spends <= paid]
        elif price:
            spends = np.array([dollars])
    spent = min(dollars, float(spends.max()) * (1 + SAME))
    return facts.with_devices(devices), replace(objective, cost_per_hour=spent)


def _any_goal(facts: Problem, objective: Objective, gap: float, effort: Effort) -> Plan | None:
    """One pipeline, kinds side by side that are filled one after the other, or some devices of the pipelines with the
    most goodput; never worse than a baseline."""
    single = search(facts, objective, gap, effort=effort)
    several = spread(facts, objective, partial(search, gap=gap, effort=effort), effort)
    free = objective.cuts is None and not facts.edges  # baselines do not keep given cuts
    plans = [single, several, *(each.plan for each in (baselines(facts, objective) if free else ()))]
    alone = objective.aim.best_alone and not objective.goodput_per_s
    if not alone and (most := _most_goodput(facts, objective.for_most_goodput, gap, effort, {})):
        plans += [_as_needed(most, facts, objective), _best_part(most, facts, objective)]
    best = best_of(plans, facts, objective)
    if best is None or (best is single and alone):
        return best
    bound = Ceiling(facts, objective, np.zeros(len(facts.devices)), effort).bound(gap)
    if objective.aim.at_given_goodput:  # the ceiling counts parts of devices, a plan has at least a whole one
        bound = max(bound, min(each.price_per_hour for each in facts.devices))
    score = evaluate(best, facts, objective)
    loss = min(max(0.0, value(best, facts, objective) / max(bound, 1e-300) - 1), MOST_GAP)
    return replace(best, promise=score.promise(loss))


def _best_part(plan: Plan, facts: Problem, objective: Objective) -> Plan | None:
    """The best numbers of devices for these pipelines, if each has one placement: all are compared by the goodput and
    the price of one device, and the first that keep the limits are taken."""
    placements = [pipeline.placements[0] for pipeline in plan.pipelines]
    if len(plan.all_placements) > len(placements) or prod(each.replicas + 1 for each in placements) > MOST_PARTS:
        return None
    scores = [evaluate(pipeline, facts) for pipeline in plan.pipelines]
    each = [
        (its.goodput_per_s / of.replicas, its.cost_per_hour / of.replicas)
        for its, of in zip(scores, placements, strict=True)
    ]
    counts = np.array([*product(*(range(of.replicas + 1) for of in placements))])[1:]  # the first has no device
    goodput_per_s, dollars = (counts @ np.array(each)).T
    values = objective.aim.value(goodput_per_s, dollars, max(its.latency_s for its in scores)) + np.zeros(len(counts))
    values[goodput_per_s * (1 + SAME) < objective.goodput_per_s] = np.inf
    if objective.cost_per_hour is not None:
        values[dollars > objective.cost_per_hour * (1 + SAME)] = np.inf
    order = np.argsort(values, kind="stable")[:PARTS_TRIED]
    parts = (_part(plan, counts[row]) for row in order if np.isfinite(values[row]))
    return next((part for part in parts if value(part, facts, objective) < np.inf), None)


def _part(plan: Plan, counts: Ints) -> Plan:
    pairs = zip(plan.pipelines, counts.tolist(), strict=True)
    return joined([
        replace(each, placements=(replace(each.placements[0], replicas=count),)) for each, count in pairs if count
    ])  # fmt: skip


def _as_needed(plan: Plan, facts: Problem, objective: Objective) -> Plan:
    """The plan without some devices, while this makes its value smaller. Large groups of devices are tried first."""
    step = max(placement.replicas for placement in plan.all_placements)
    best, least = plan, value(plan, facts, objective)
    while step:
        fewer = min(_fewer(best, step), key=lambda each: value(each, facts, objective), default=best)
        if (smaller := value(fewer, facts, objective)) < least:
            best, least = fewer, smaller
        else:
            step //= 2
    return best


def _fewer(plan: Plan, step: int) -> Iterator[Plan]:
    """The plans with `step` replicas fewer in one placement, or without one of the pipelines."""
    pipelines = plan.pipelines
    for index, pipeline in enumerate(pipelines):
        before, after = pipelines[:index], pipelines[index + 1 :]
        if before or after:
            yield joined([*before, *after])
        for place, placement in enumerate(pipeline.placements):
            if placement.replicas > step:
                fewer = replace(placement, replicas=placement.replicas - step)
                placements = (*pipeline.placements[:place], fewer, *pipeline.placements[place + 1 :])
                yield joined([*before, replace(pipeline, placements=placements), *after])


def _most_goodput(facts: Problem, objective: Objective, gap: float, effort: Effort, known: Alone) -> Plan | None:
    """Plan every set of kinds in turn, until the ceiling shows that no more can be gained."""
    alone = replace(objective, goodput_per_s=0.0)
    all_kinds = frozenset(range(len(facts.devices)))
    planned: dict[Kinds, Plan] = {}
    least = 0.0
    for kinds in _sets(len(facts.devices), effort.kinds_in_all_sets):
        if len(kinds) == 2 and not least:
            each_alone = [bound_per_s(planned.get(frozenset({kind}))) for kind in sorted(all_kinds)]
            least = Ceiling(facts, alone, np.array(each_alone, float), effort).bound(gap)
        most = _most(planned, len(facts.devices))
        if least * max(_together_per_s(most[all_kinds]) * (1 + gap), 1e-300) >= 1:
            break
        if least and planned and effort.out_of_time():
            break
        here = [facts.devices[kind] for kind in sorted(kinds)]
        if len(here) == 1:
            plan = by_itself(here[0], facts, alone, gap, effort, known)
        else:  # the ceiling bounds what kinds can do together, so a chain of several needs no proof of its own
            apart = _together_per_s(most[kinds]) * (1 + max(gap, SAME))
            below = 1 / apart if apart else np.inf
            plan = search(facts.with_devices(here), alone, gap, below=below, prove=False, effort=effort)
        if plan:
            planned[kinds] = plan
    best = _most(planned, len(facts.devices))[all_kinds]
    proved = least * _together_per_s(best) * (1 + gap) >= 1
    if not proved and len(facts.devices) <= effort.kinds_shared and not effort.out_of_time():
        shared = tuple(Sharing(facts, alone, gap, effort, known).pipelines())
        best = max(best, shared, key=_together_per_s)
    if not best or _together_per_s(best) * (1 + SAME) < objective.goodput_per_s:
        return None
    return _joined(best, facts, 1 / least if least else np.inf)


def _sets(kinds: int, all_up_to: int) -> Iterator[Kinds]:
    """Small sets first: they are planned quickly, and are often enough."""
    sizes = range(1, kinds + 1) if kinds <= all_up_to else (1, 2, kinds)
    for size in sizes:
        yield from map(frozenset, combinations(range(kinds), size))


def _together_per_s(pipelines: Pipelines) -> float:
    return sum(map(promised_per_s, pipelines))


def _most(plans: dict[Kinds, Plan], num_kinds: int) -> dict[Kinds, Pipelines]:
    """`most` of every set of kinds, from the sets planned so far."""
    most: dict[Kinds, Pipelines] = {frozenset(): ()}
    for kind in range(num_kinds):
        for rest in list(most):
            kinds = rest | {kind}
            chains = [chain for chain in plans if kind in chain <= kinds]
            choices = [(plans[chain], *most[kinds - chain]) for chain in chains]
            most[kinds] = max([most[rest], *choices], key=_together_per_s)
    return most


def _joined(pipelines: Pipelines, facts: Problem, ceiling: float) -> Plan:
    plan = joined(sorted(pipelines, key=promised_per_s, reverse=True))
    score = evaluate(plan, facts)
    gap = min(max(0.0, float(ceiling) / score.goodput_per_s - 1), MOST_GAP)
    return replace(plan, promise=score.promise(gap if gap > SAME else 0.0))
