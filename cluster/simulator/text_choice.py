"""Chooses a decoder's plan: of those with the best estimates, the best one in simulations.

A plan promises the highest rate at which nearly all texts keep the limits on TTFT and TPOT.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import ceil, inf, prod
from operator import gt
from typing import TypeVar

import numpy as np

from isobatch.cluster.load.workloads import arrivals, highest
from isobatch.cluster.simulator.text_simulation import DecodingRun, simulate_texts, text_arrivals
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.optimizer.plan import Plan, Promise
from isobatch.optimizer.text_plans import (
    DecodingFacts,
    DecodingGoal,
    DecodingWay,
    expected_paces,
    misfit,
    most_promising,
    plan_of,
    promising,
    residents_of,
    shares_of,
    terms_of,
    tokens_per_s,
    with_terms,
)
from isobatch.profiles.devices import Device
from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import DecoderProfile

Kept = TypeVar("Kept")
NUM_SIMULATED = 4  # ways to decode that are simulated for each kind of device
MOST_REPLICAS = 16  # that are simulated, in place of all: each of them gets the same share of the texts
TURNS = 4  # the least texts of a run, as a multiple of the residents
PROMISE_LENGTH = 3  # the run that makes the promise has this many times as many texts
NEAR_SHARE = 0.8  # of the highest possible rate: the search for the sustained rate begins between both
NEAR_STEPS = 4  # halvings of that interval
FAR_STEPS = 5  # halvings of the interval below it, if no rate in the first is sustained
# The sustainable share of a never idle replica's tokens. A short run may show more, as an overload shows only once the
# queue is as long as TTFT.
BUSY = 0.97
# The share of the time in which the front's processor passes tokens on: sockets and requests take the rest.
FRONT_BUSY = 0.5
MOST_GAIN = 1.2  # a fleet may sustain more than its devices one by one: the largest multiple that is tried
# Devices of one kind that sustain this multiple of a rate one by one surely sustain the rate together.
SURELY = 2.0
MOST_COUNTS = 200_000  # numbers of devices of each kind that are compared
BETTER = 1.01  # another way is better if it sustains this multiple
FOR_EVER_S = 1e9
PROMISE_SEED = 1  # the best of several plans is partly best by chance, so other random texts make the promise


@dataclass(frozen=True)
class DecodingTrial:
    texts_per_s: float
    run: DecodingRun

    def keeps(self, goal: DecodingGoal) -> bool:
        return min(self.run.ttft_kept, self.run.tpot_kept) >= goal.share_in_time and not self.run.given_up


@dataclass(frozen=True)
class DecodingChoice:
    """A plan, the run that decided its promise, and `ceiling_per_s`: the tokens per second of replicas that are never
    idle, estimated or simulated, whichever is more."""

    plan: Plan
    run: DecodingRun
    ceiling_per_s: float
    num_ways: int  # ways to decode whose estimates were compared


@dataclass(frozen=True)
class _BestOfKind:
    """The best way to write on one kind of device: `texts_per_s` of one replica, which cannot exceed `most_per_s`.

    `ceiling_per_s`: the most tokens of a replica that is never idle and keeps no limits, of all `num_ways` by
    arithmetic.
    """

    facts: DecodingFacts
    way: DecodingWay
    texts_per_s: float
    most_per_s: float
    ceiling_per_s: float
    num_ways: int

    @property
    def kind(self) -> str:
        return self.facts.device.kind

    @property
    def count(self) -> int:
        return self.facts.device.count


def choose_plan(profile: DecoderProfile, fleet: Sequence[Device], goal: DecodingGoal) -> DecodingChoice:
    """The best plan, with pipelines side by side if there are several kinds of devices.

    Raise UserError with the limit that cannot be kept if there is no plan.
    """
    bests = _best_of_each_kind(profile, fleet, goal)
    plan, trial = _cheapest(bests, goal) if goal.texts_per_s else _on_all_devices(bests, goal)
    devices, output = plan.devices(), profile.workload.output
    used = [(devices.get(best.kind, 0), best) for best in bests]
    # Estimates assume that all launches of a part are equal, so a run may write more.
    ceiling = sum(count * max(best.ceiling_per_s, best.most_per_s / BUSY * output) for count, best in used)
    cost = sum(count * best.facts.device.price_per_hour for count, best in used)
    tokens = trial.texts_per_s * output
    promise = Promise(trial.texts_per_s, goal.ttft_s, cost, max(0.0, ceiling / tokens - 1))
    plan = replace(promising(plan, tokens), promise=promise)
    return DecodingChoice(plan, trial.run, ceiling, sum(best.num_ways for best in bests))


@lru_cache(maxsize=8)
def plan_on_all(profile: DecoderProfile, fleet: tuple[Device, ...], goal: DecodingGoal) -> Plan:
    """The best plan on all devices, for callers that simulate it again, since its promise is partly chance."""
    bests = _best_of_each_kind(profile, fleet, goal)
    return _side_by_side(bests, [best.count for best in bests], goal)


def _best_of_each_kind(profile: DecoderProfile, fleet: Sequence[Device], goal: DecodingGoal) -> list[_BestOfKind]:
    """The best way to decode on each kind of device that can keep the limits."""
    facts = [DecodingFacts(profile, device) for device in fleet if device.count]
    if not facts:
        raise UserError("there are no devices to plan for: a fleet needs at least one")
    bests = [best for each in facts if (best := _best_way(each, goal))]
    if not bests:
        raise UserError(_obstacle(facts, goal))
    return bests


def _best_way(facts: DecodingFacts, goal: DecodingGoal) -> _BestOfKind | None:
    """The way to decode that sustains most on one device of a kind; None if no way keeps the limits."""
    if misfit(facts, goal):
        return None
    best: _BestOfKind | None = None
    all_paces = expected_paces(facts, goal)
    ceiling = max(pace.tokens_per_s for pace in all_paces)
    for pace in most_promising(all_paces, goal, NUM_SIMULATED):
        plan, least = plan_of(pace.way, facts, goal, 1), BETTER * best.texts_per_s if best else 0.0
        most = BUSY * saturated(plan, facts.profile, goal.texts // 2)
        if most > least and (trial := _highest_trial(plan, facts.profile, goal, least, most)):
            best = _BestOfKind(facts, pace.way, trial.texts_per_s, most, ceiling, len(all_paces))
    return best


def saturated(plan: Plan, profile: DecoderProfile, texts: int) -> float:
    """Texts per second of replicas that are never idle: all texts come at once, and more than have a place."""
    plan, share = _with_few_replicas(plan)
    resident = residents_of(plan)
    # Texts of one length end together, so whole rounds of all residents are counted, and one more round follows. With
    # exits they end one by one: at the end of a round residents have begun texts, which are not counted. Nor is the
    # first round, at whose end they had begun others.
    rounds = max(TURNS, ceil(texts / resident))
    count = (rounds + 1) * resident
    config = DecoderConfig(model="", max_waiting=count)
    wide = plan.with_each(partial(with_terms, ttft_s=FOR_EVER_S, tpot_s=FOR_EVER_S))
    run = simulate_texts(wide, profile, text_arrivals(profile.readable, np.zeros(count), seed=0), config=config)
    ended_s = sorted(text.last_s for text in run.answered)[resident - 1 : rounds * resident]
    return (len(ended_s) - 1) / (ended_s[-1] - ended_s[0]) / share


def trial_at(
    plan: Plan, profile: DecoderProfile, texts_per_s: float, goal: DecodingGoal, seed: int = 0, times: int = 1
) -> DecodingTrial:
    """Simulate texts that come at random times at a rate, until the end or until too many have missed a limit."""
    plan, share = _with_few_replicas(plan)
    rate, count = share * texts_per_s, times * max(goal.texts, TURNS * residents_of(plan))
    texts = text_arrivals(profile.workload, arrivals("poisson", rate, count / rate, seed), seed)
    run = simulate_texts(plan, profile, texts, seed, may_miss=(1.0 - goal.share_in_time) * len(texts))
    return DecodingTrial(texts_per_s, run)


def _with_few_replicas(plan: Plan) -> tuple[Plan, float]:
    """The plan with at most about `MOST_REPLICAS` replicas, and their share of all texts: hundreds take hours."""
    fewer = min(1.0, MOST_REPLICAS / sum(plan.devices().values()))

    def smaller(pipeline: Plan) -> Plan:
        (placement,) = pipeline.placements
        count = max(1, round(fewer * placement.replicas))
        tokens = terms_of(pipeline).tokens_per_s * count / placement.replicas
        return with_terms(replace(pipeline, placements=(replace(placement, replicas=count),)), tokens_per_s=tokens)

    few = plan.with_each(smaller)
    return few, sum(shares_of(few)) / sum(shares_of(plan))


@lru_cache(maxsize=64)
def sustains(plan: Plan, profile: DecoderProfile, goal: DecodingGoal) -> float:
    """The highest texts per second at which a plan keeps both limits; 0 if there is none.

    The random texts are not those by which plans are chosen.
    """
    trial = _highest_trial(plan, profile, goal, 0.0, BUSY * saturated(plan, profile, goal.texts // 2), PROMISE_SEED)
    return trial.texts_per_s if trial else 0.0


def _highest_trial(
    plan: Plan, profile: DecoderProfile, goal: DecodingGoal, low: float, high: float, seed: int = 0, times: int = 1
) -> DecodingTrial | None:
    """The trial at the highest rate between `low` and `high` that keeps the limits. Loose limits are kept at `high`."""
    at = partial(trial_at, plan, profile, goal=goal, seed=seed, times=times)

    def keeps(trial: DecodingTrial) -> bool:
        return trial.keeps(goal)

    if keeps(top := at(high)):
        return top
    if low and not keeps(at(low)):
        return None
    near = max(low, NEAR_SHARE * high)
    best = highest(at, keeps, near, high, NEAR_STEPS)
    return best or (highest(at, keeps, low, near, FAR_STEPS) if near > low else None)


def _side_by_side(bests: Sequence[_BestOfKind], counts: Sequence[int], goal: DecodingGoal) -> Plan:
    """A pipeline on this number of devices of each kind; each promises the sum of what single devices sustain."""
    pipelines = []
    for best, count in zip(bests, counts, strict=True):
        if count:
            plan = plan_of(best.way, best.facts, goal, count)
            tokens = count * best.texts_per_s * best.facts.profile.workload.output
            pipelines.append(with_terms(plan, tokens_per_s=tokens))
    first, *others = sorted(pipelines, key=tokens_per_s, reverse=True)
    return replace(first, beside=tuple(others))


def _on_all_devices(bests: Sequence[_BestOfKind], goal: DecodingGoal) -> tuple[Plan, DecodingTrial]:
    """The plan on all devices of the kinds that can keep the limits."""
    plan = _side_by_side(bests, [best.count for best in bests], goal)
    most = sum(best.count * min(MOST_GAIN * best.texts_per_s, best.most_per_s) for best in bests)
    most = min(most, _front_texts_per_s(bests[0].facts.profile))
    trial = _highest_trial(plan, bests[0].facts.profile, goal, 0.0, most, PROMISE_SEED, PROMISE_LENGTH)
    if trial is None:
        raise UserError(_obstacle([best.facts for best in bests], goal))
    return plan, trial


def _front_texts_per_s(profile: DecoderProfile) -> float:
    """The texts per second whose tokens the front can pass on, by the slowest of the devices on which it was timed."""
    token_s = max(table.front_s for table in profile.tables)
    return FRONT_BUSY / (token_s * profile.workload.output) if token_s else inf


def _cheapest(bests: Sequence[_BestOfKind], goal: DecodingGoal) -> tuple[Plan, DecodingTrial]:
    """The plan on the cheapest devices that sustain the goal's rate."""
    if goal.texts_per_s > (most := _front_texts_per_s(bests[0].facts.profile)):
        raise UserError(
            f"{goal.texts_per_s:.4g} texts per second: one front can pass on the tokens of at most {most:.4g}"
        )

    def sustained(counts: Sequence[int]) -> float:
        return sum(count * best.texts_per_s for best, count in zip(bests, counts, strict=True))

    def kept(counts: Sequence[int]) -> tuple[Plan, DecodingTrial] | None:
        plan = _side_by_side(bests, counts, goal)
        trial = trial_at(plan, bests[0].facts.profile, goal.texts_per_s, goal, PROMISE_SEED, PROMISE_LENGTH)
        return (plan, trial) if trial.keeps(goal) else None

    def cost(counts: Sequence[int]) -> tuple[float, int]:
        """Dollars per hour; at equal cost (of free devices, for instance), fewer devices are better."""
        dollars = sum(count * best.facts.device.price_per_hour for best, count in zip(bests, counts, strict=True))
        return dollars, sum(counts)

    possible = sorted(_possible_counts(bests, goal.texts_per_s), key=lambda counts: (cost(counts), counts))
    expected = sum(sustained(counts) < goal.texts_per_s for counts in possible)
    if cheapest := cheapest_kept(possible, cost, kept, expected):
        return cheapest
    all_ = [best.count for best in bests]
    devices = ", ".join(f"{best.count} {best.kind}" for best in bests)
    raise UserError(
        f"{goal.texts_per_s:.4g} texts per second: {devices} sustain about {sustained(all_):.4g} within {_limits(goal)}"
    )


def cheapest_kept(
    possible: Sequence[tuple[int, ...]], cost: Callable[[Sequence[int]], tuple[float, int]],
    kept: Callable[[Sequence[int]], Kept | None], at: int,
) -> Kept | None:  # fmt: skip
    """What `kept` returns for the cheapest numbers of devices for which it is not None; `at`: where to begin.

    `possible` ascends by cost. If some numbers of devices do not suffice, smaller ones do not either. So each trial
    rules out either these, or all that cost as much or more. The steps grow until some numbers suffice.
    """
    best: Kept | None = None
    while possible:
        counts = possible[min(at, len(possible) - 1)]
        if result := kept(counts):
            best, possible = result, [each for each in possible if cost(each) < cost(counts)]
        else:
            possible = [each for each in possible if any(map(gt, each, counts))]
        at = 2 * at + 1 if best is None else len(possible) // 2
    return best


def _possible_counts(bests: Sequence[_BestOfKind], texts_per_s: float) -> Iterator[tuple[int, ...]]:
    """Counts of devices of each kind that could sustain a rate at the least cost: a fleet may have many more.

    Where they would be too many, those of all kinds but the last come in steps, and the last kind fills the rest.
    """
    *others, last = bests
    *ranges, most = (min(best.count, ceil(SURELY * texts_per_s / best.texts_per_s)) + 1 for best in bests)
    times = max(1.0, most * prod(ranges) / MOST_COUNTS) ** (1 / max(1, len(ranges)))
    steps = ({*range(0, each, ceil(times)), each - 1} for each in ranges)
    for counts in product(*map(sorted, steps)):
        rest = texts_per_s - sum(count * best.most_per_s for count, best in zip(counts, others, strict=True))
        for count in range(max(0, ceil(rest / last.most_per_s)), most):
            yield *counts, count


def _obstacle(facts: Sequence[DecodingFacts], goal: DecodingGoal) -> str:
    """Why there is no plan, for the kind of device on which a single text comes nearest to the limits."""
    lacking = [why for each in facts if (why := misfit(each, goal))]
    rest = [each for each in facts if not misfit(each, goal)]
    if not rest:
        return lacking[0]
    paces = [
        (pace, each.device.kind) for each in rest for pace in expected_paces(each, goal) if pace.way.residents == 1
    ]
    alone, kind = min(paces, key=lambda each: max(each[0].ttft_s / goal.ttft_s, each[0].tpot_s / goal.tpot_s))
    ttft_s, tpot_s = alone.ttft_s, alone.tpot_s
    if tpot_s > goal.tpot_s:
        return f"TPOT of {1e3 * goal.tpot_s:.4g} ms: even alone, tokens of a text take {1e3 * tpot_s:.4g} ms on {kind}"
    if ttft_s > goal.ttft_s:
        return f"TTFT of {1e3 * goal.ttft_s:.4g} ms: even alone, a text begins after {1e3 * ttft_s:.4g} ms on {kind}"
    limits = f"{_limits(goal)} for {goal.share_in_time:.0%} of the texts"
    return f"no way to write keeps {limits} on {kind}: loosen one of them"


def _limits(goal: DecodingGoal) -> str:
    return f"TTFT {1e3 * goal.ttft_s:.4g} ms and TPOT {1e3 * goal.tpot_s:.4g} ms"
