"""Chooses how a decoder decodes: of the ways that promise most by arithmetic, the one that keeps most when played.

What is promised is the highest rate at which nearly all texts begin within TTFT and go on within TPOT.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import numpy as np

from cluster.decoding.playing import DecodingRun, asked_texts, play, tpot_of
from cluster.load.workloads import arrivals, highest
from deployments.decoding.config import DecoderConfig
from optimizer.decoding import (
    PROMPT_ROWS,
    DecodingFacts,
    DecodingGoal,
    DecodingWay,
    cuts_of,
    fits,
    paces,
    plan_of,
    screened,
)
from optimizer.plan import DecodingTerms, Plan, Promise
from profiles.decoding import DecoderProfile
from profiles.devices import Device
from profiles.errors import UserError

PLAYED = 4  # ways of each kind of device
TURNS = 4  # a run has so many times as many texts as are resident, at least
JUDGED = 3  # times as many in the runs that a promise is of
STEPS = 5  # halvings between the rates that may be kept
# Of what a replica writes that is never idle. More cannot be kept for long, though a short run may look well: an
# overload shows only once the queue is as long as TTFT.
BUSY = 0.97
BETTER = 1.01  # another way is taken if it keeps so many times as much
LONE, APART_S = 40, 1e6  # texts that come one by one, to see what is possible at all
FOR_EVER_S = 1e9
OTHER_SEED = 1  # the best of many is best by chance as well: other texts decide what is promised


@dataclass(frozen=True)
class DecodingTrial:
    """A run at a rate."""

    texts_per_s: float
    run: DecodingRun

    def keeps(self, goal: DecodingGoal) -> bool:
        return min(self.run.ttft_kept, self.run.tpot_kept) >= goal.kept


@dataclass(frozen=True)
class DecodingChoice:
    """A plan, the run that its promise is of, and tokens per second of replicas that are never idle: the most by
    arithmetic, or in a run, if that is more."""

    plan: Plan
    run: DecodingRun
    ceiling_per_s: float
    looked_at: int  # ways


@dataclass(frozen=True)
class _OfKind:
    """The best way on one kind of device, and texts per second: that one replica keeps, and cannot exceed.

    `ceiling_per_s`: tokens of a replica that is never idle and keeps no limit, the most of all `ways` by arithmetic.
    """

    facts: DecodingFacts
    way: DecodingWay
    texts_per_s: float
    most_per_s: float
    ceiling_per_s: float
    ways: int

    def hoped(self, replicas: int) -> float:
        return replicas * self.texts_per_s


def chosen(profile: DecoderProfile, fleet: Sequence[Device], goal: DecodingGoal) -> DecodingChoice:
    """The best plan; raise UserError with what binds where there is none."""
    facts = [DecodingFacts(profile, device) for device in fleet if device.count]
    if not facts:
        raise UserError("there are no devices to plan for: a fleet needs at least one")
    found = [best for each in facts if (best := _best(each, goal))]
    if not found:
        raise UserError(_binds(facts, goal))
    best, plan, played_at = _with_rate(found, goal) if goal.texts_per_s else _with_all(found, goal)
    replicas, tokens = plan.placements[0].replicas, played_at.texts_per_s * profile.workload.output
    # Arithmetic takes all launches of a part as alike, so a run may have more.
    most = replicas * max(best.ceiling_per_s, best.most_per_s / BUSY * profile.workload.output)
    cost = replicas * best.facts.device.price_per_hour
    promise = Promise(played_at.texts_per_s, goal.ttft_s, cost, max(0.0, 1 - tokens / most))
    plan = replace(plan, promise=promise, decoding=replace(terms_of(plan), tokens_per_s=tokens))
    return DecodingChoice(plan, played_at.run, most, sum(each.ways for each in found))


def _best(facts: DecodingFacts, goal: DecodingGoal) -> _OfKind | None:
    """The way that keeps most on one device of a kind; None where none keeps the limits."""
    if fits(facts, goal):
        return None
    best: _OfKind | None = None
    all_ways = paces(facts, goal)
    most_of_all = max(each.tokens_per_s for each in all_ways)
    for each in screened(all_ways, goal, PLAYED):
        plan, least = plan_of(each.way, facts, goal, 1), BETTER * best.texts_per_s if best else 0.0
        most = BUSY * saturated(plan, facts.profile, goal.texts // 2)
        if most <= least or (best and not played(plan, facts.profile, least, goal.texts).keeps(goal)):
            continue
        if found := _most(plan, facts.profile, goal, least, most):
            best = _OfKind(facts, each.way, found.texts_per_s, most, most_of_all, len(all_ways))
    return best


def saturated(plan: Plan, profile: DecoderProfile, texts: int) -> float:
    """Texts per second that are ended while more wait than have a place: they all come at once."""
    resident = plan.placements[0].replicas * plan.splits[0].batch_size
    # Texts of one length end together, so whole rounds of all residents are counted, and one follows them.
    rounds = max(TURNS, ceil(texts / resident))
    count = (rounds + 1) * resident
    config = DecoderConfig(model="", max_waiting=count)
    wide = replace(plan, decoding=replace(terms_of(plan), ttft_s=FOR_EVER_S, tpot_s=FOR_EVER_S))
    run = play(wide, profile, asked_texts(profile.workload, np.zeros(count), seed=0), config=config)
    ended_s = sorted(text.last_s for text in run.answered)[: rounds * resident]
    return len(ended_s) / ended_s[-1]


def terms_of(plan: Plan) -> DecodingTerms:
    """How a plan's replicas decode."""
    assert plan.decoding, "This is a bug: it is a plan for a network that classifies."
    return plan.decoding


def played(
    plan: Plan, profile: DecoderProfile, texts_per_s: float, texts: int, seed: int = 0, times: int = 1
) -> DecodingTrial:
    """What becomes of texts that come at a rate, by chance."""
    count = times * max(texts, TURNS * plan.placements[0].replicas * plan.splits[0].batch_size)
    times_s = arrivals("poisson", texts_per_s, count / texts_per_s, seed)
    return DecodingTrial(texts_per_s, play(plan, profile, asked_texts(profile.workload, times_s, seed), seed))


@lru_cache(maxsize=64)
def sustains(plan: Plan, profile: DecoderProfile, goal: DecodingGoal) -> float:
    """The texts per second at which a plan keeps both limits; 0 where it keeps them at none."""
    found = _most(plan, profile, goal, 0.0, BUSY * saturated(plan, profile, goal.texts // 2))
    return found.texts_per_s if found else 0.0


def _most(
    plan: Plan, profile: DecoderProfile, goal: DecodingGoal, low: float, high: float, seed: int = 0, times: int = 1
) -> DecodingTrial | None:
    """The trial at the highest rate between these that keeps the limits."""
    return highest(
        lambda rate: played(plan, profile, rate, goal.texts, seed, times),
        lambda trial: trial.keeps(goal),
        low,
        high,
        STEPS,
    )


def _with_all(found: Sequence[_OfKind], goal: DecodingGoal) -> tuple[_OfKind, Plan, DecodingTrial]:
    """All devices of the kind that writes most."""
    best = max(found, key=lambda each: each.facts.device.count * each.texts_per_s)
    plan, hoped = plan_of(best.way, best.facts, goal, best.facts.device.count), best.hoped(best.facts.device.count)
    most = min(1.2 * hoped, best.facts.device.count * best.most_per_s)
    trial = _most(plan, best.facts.profile, goal, 0.7 * hoped, most, OTHER_SEED, JUDGED)
    trial = trial or _most(plan, best.facts.profile, goal, 0.0, 0.7 * hoped, OTHER_SEED, JUDGED)
    if trial is None:
        raise UserError(_binds([best.facts], goal))
    return best, plan, trial


def _with_rate(found: Sequence[_OfKind], goal: DecodingGoal) -> tuple[_OfKind, Plan, DecodingTrial]:
    """The cheapest devices of one kind that sustain the rate."""
    able: list[tuple[float, _OfKind, Plan, DecodingTrial]] = []
    for each in found:
        device = each.facts.device
        for count in range(ceil(goal.texts_per_s / each.most_per_s), device.count + 1):
            plan = plan_of(each.way, each.facts, goal, count)
            trial = played(plan, each.facts.profile, goal.texts_per_s, goal.texts, OTHER_SEED, JUDGED)
            if trial.keeps(goal):
                able.append((count * device.price_per_hour, each, plan, trial))
                break
    if not able:
        most = max(found, key=lambda each: each.hoped(each.facts.device.count))
        sustained, kind = most.hoped(most.facts.device.count), most.facts.device.kind
        raise UserError(
            f"{goal.texts_per_s:.4g} texts per second: {most.facts.device.count} {kind} sustain about {sustained:.4g} "
            f"within {_limits(goal)}"
        )
    return min(able, key=lambda each: each[0])[1:]


def _binds(facts: Sequence[DecodingFacts], goal: DecodingGoal) -> str:
    """Why there is no plan, in a sentence: of the devices where one text comes nearest to the limits."""
    lacking = [why for each in facts if (why := fits(each, goal))]
    rest = [each for each in facts if not fits(each, goal)]
    if not rest:
        return lacking[0]
    ttft_s, tpot_s, kind = min(
        ((*_alone(each, goal), each.device.kind) for each in rest),
        key=lambda found: max(found[0] / goal.ttft_s, found[1] / goal.tpot_s),
    )
    if tpot_s > goal.tpot_s:
        return f"TPOT of {1e3 * goal.tpot_s:.4g} ms: even alone, tokens of a text take {1e3 * tpot_s:.4g} ms on {kind}"
    if ttft_s > goal.ttft_s:
        return f"TTFT of {1e3 * goal.ttft_s:.4g} ms: even alone, a text begins after {1e3 * ttft_s:.4g} ms on {kind}"
    return f"no way to decode keeps {_limits(goal)} for {goal.kept:.0%} of the texts on {kind}: loosen one of them"


def _alone(facts: DecodingFacts, goal: DecodingGoal) -> tuple[float, float]:
    """TTFT and TPOT that so many texts keep which come one by one, cut where these are shortest."""
    found = []
    for cut in cuts_of(facts.profile, goal):
        plan = plan_of(
            DecodingWay(cut, 1, 1, PROMPT_ROWS[-1]), facts, replace(goal, ttft_s=FOR_EVER_S, tpot_s=FOR_EVER_S), 1
        )
        texts = asked_texts(facts.profile.workload, APART_S * np.arange(LONE, dtype=np.float64), seed=0)
        run = play(plan, facts.profile, texts)
        ttft = np.quantile([text.first_s - text.due_s for text in run.answered], goal.kept)
        tpot = np.quantile([tpot_of(text) for text in run.answered], goal.kept)
        found.append((float(ttft), float(tpot)))
    return min(found, key=lambda each: max(each[0] / goal.ttft_s, each[1] / goal.tpot_s))


def _limits(goal: DecodingGoal) -> str:
    return f"TTFT {1e3 * goal.ttft_s:.4g} ms and TPOT {1e3 * goal.tpot_s:.4g} ms"
