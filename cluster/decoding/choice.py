"""Chooses how a decoder decodes: of the ways that promise most by arithmetic, the one that keeps most when played.

What is promised is the highest rate at which nearly all texts begin within TTFT and go on within TPOT.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import ceil

import numpy as np

from cluster.decoding.simulation import DecodingRun, asked_texts, play, tpot_of
from cluster.load.workloads import arrivals, highest
from deployments.decoding.config import DecoderConfig
from optimizer.decoding import PROMPT_ROWS, DecodingFacts, DecodingGoal, DecodingWay, cuts_of, fits, paces, screened
from optimizer.decoding_plans import on_terms, plan_of, promising, residents_of, terms_of, tokens_per_s
from optimizer.plan import Plan, Promise
from profiles.decoding import DecoderProfile
from profiles.devices import Device
from profiles.errors import UserError

PLAYED = 4  # ways of each kind of device
TURNS = 4  # a run has so many times as many texts as are resident, at least
JUDGED = 3  # times as many in the runs that a promise is of
NEAR, STEPS, FAR_STEPS = 0.8, 4, 5  # a rate that is kept is sought near the highest that may be, and then below
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
        return min(self.run.ttft_kept, self.run.tpot_kept) >= goal.kept and not self.run.given_up


@dataclass(frozen=True)
class DecodingChoice:
    """A plan, the run that its promise is of, and tokens per second of replicas that are never idle: the most by
    arithmetic, or in a run, if that is more."""

    plan: Plan
    run: DecodingRun
    ceiling_per_s: float
    num_ways: int  # ways to decode that were compared by arithmetic


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

    @property
    def kind(self) -> str:
        return self.facts.device.kind

    @property
    def count(self) -> int:
        return self.facts.device.count

    def on(self, replicas: int) -> float:
        """Texts per second that so many may keep."""
        return replicas * self.texts_per_s


def chosen(profile: DecoderProfile, fleet: Sequence[Device], goal: DecodingGoal) -> DecodingChoice:
    """The best plan, of pipelines side by side where there are several kinds of devices; raise UserError with what
    binds where there is none."""
    found = _found(profile, fleet, goal)
    plan, trial = _with_rate(found, goal) if goal.texts_per_s else _with_all(found, goal)
    has, tokens = plan.devices(), trial.texts_per_s * profile.workload.output
    used = [(has.get(each.kind, 0), each) for each in found]
    # Arithmetic takes all launches of a part as alike, so a run may have more.
    most = sum(
        count * max(each.ceiling_per_s, each.most_per_s / BUSY * profile.workload.output) for count, each in used
    )
    cost = sum(count * each.facts.device.price_per_hour for count, each in used)
    promise = Promise(trial.texts_per_s, goal.ttft_s, cost, max(0.0, 1 - tokens / most))
    plan = replace(promising(plan, tokens), promise=promise)
    return DecodingChoice(plan, trial.run, most, sum(each.ways for each in found))


@lru_cache(maxsize=8)
def hoped(profile: DecoderProfile, fleet: tuple[Device, ...], goal: DecodingGoal) -> Plan:
    """The same plan on all these devices, with what it kept when it was chosen, which is what luck helped it to: for
    those who play it again anyway, beside others."""
    found = _found(profile, fleet, goal)
    return _side_by_side(found, [each.count for each in found], goal)


def _found(profile: DecoderProfile, fleet: Sequence[Device], goal: DecodingGoal) -> list[_OfKind]:
    """The best way on each kind of device on which the limits can be kept."""
    facts = [DecodingFacts(profile, device) for device in fleet if device.count]
    if not facts:
        raise UserError("there are no devices to plan for: a fleet needs at least one")
    found = [best for each in facts if (best := _best(each, goal))]
    if not found:
        raise UserError(_binds(facts, goal))
    return found


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
        if most > least and (found := _most(plan, facts.profile, goal, least, most)):
            best = _OfKind(facts, each.way, found.texts_per_s, most, most_of_all, len(all_ways))
    return best


def saturated(plan: Plan, profile: DecoderProfile, texts: int) -> float:
    """Texts per second that are ended while more wait than have a place: they all come at once."""
    resident = residents_of(plan)
    # Texts of one length end together, so whole rounds of all residents are counted, and one follows them.
    rounds = max(TURNS, ceil(texts / resident))
    count = (rounds + 1) * resident
    config = DecoderConfig(model="", max_waiting=count)
    wide = on_terms(plan, lambda each: replace(terms_of(each), ttft_s=FOR_EVER_S, tpot_s=FOR_EVER_S))
    run = play(wide, profile, asked_texts(profile.workload, np.zeros(count), seed=0), config=config)
    ended_s = sorted(text.last_s for text in run.answered)[: rounds * resident]
    return len(ended_s) / ended_s[-1]


def played(
    plan: Plan, profile: DecoderProfile, texts_per_s: float, goal: DecodingGoal, seed: int = 0, times: int = 1
) -> DecodingTrial:
    """What becomes of texts that come at a rate, by chance; it is given up once too many have missed a limit."""
    count = times * max(goal.texts, TURNS * residents_of(plan))
    texts = asked_texts(profile.workload, arrivals("poisson", texts_per_s, count / texts_per_s, seed), seed)
    return DecodingTrial(texts_per_s, play(plan, profile, texts, seed, may_miss=(1.0 - goal.kept) * len(texts)))


@lru_cache(maxsize=64)
def sustains(plan: Plan, profile: DecoderProfile, goal: DecodingGoal) -> float:
    """The texts per second at which a plan keeps both limits; 0 where it keeps them at none. The texts are others than
    plans are chosen with."""
    found = _most(plan, profile, goal, 0.0, BUSY * saturated(plan, profile, goal.texts // 2), OTHER_SEED)
    return found.texts_per_s if found else 0.0


def _most(
    plan: Plan, profile: DecoderProfile, goal: DecodingGoal, low: float, high: float, seed: int = 0, times: int = 1
) -> DecodingTrial | None:
    """The trial at the highest rate between these that keeps the limits. Where these are loose, it is the highest."""

    def at(rate: float) -> DecodingTrial:
        return played(plan, profile, rate, goal, seed, times)

    def kept(trial: DecodingTrial) -> bool:
        return trial.keeps(goal)

    if kept(top := at(high)):
        return top
    if low and not kept(at(low)):
        return None
    near = max(low, NEAR * high)
    return highest(at, kept, near, high, STEPS) or (highest(at, kept, low, near, FAR_STEPS) if near > low else None)


def _side_by_side(found: Sequence[_OfKind], counts: Sequence[int], goal: DecodingGoal) -> Plan:
    """A pipeline on so many devices of each kind; each promises what its devices keep one by one."""
    parts = []
    for each, count in zip(found, counts, strict=True):
        if count:
            plan, output = plan_of(each.way, each.facts, goal, count), each.facts.profile.workload.output
            tokens = each.on(count) * output
            parts.append(replace(plan, decoding=replace(terms_of(plan), tokens_per_s=tokens)))
    first, *others = sorted(parts, key=tokens_per_s, reverse=True)
    return replace(first, beside=tuple(others))


def _with_all(found: Sequence[_OfKind], goal: DecodingGoal) -> tuple[Plan, DecodingTrial]:
    """All devices of all kinds on which the limits can be kept."""
    plan = _side_by_side(found, [each.count for each in found], goal)
    most = sum(each.count * min(1.2 * each.texts_per_s, each.most_per_s) for each in found)
    profile = found[0].facts.profile
    trial = _most(plan, profile, goal, 0.0, most, OTHER_SEED, JUDGED)
    if trial is None:
        raise UserError(_binds([each.facts for each in found], goal))
    return plan, trial


def _with_rate(found: Sequence[_OfKind], goal: DecodingGoal) -> tuple[Plan, DecodingTrial]:
    """The cheapest devices that sustain the rate."""
    profile = found[0].facts.profile
    for counts in sorted(_enough(found, goal.texts_per_s), key=partial(_cost_per_hour, found)):
        plan = _side_by_side(found, counts, goal)
        trial = played(plan, profile, goal.texts_per_s, goal, OTHER_SEED, JUDGED)
        if trial.keeps(goal):
            return plan, trial
    devices = ", ".join(f"{each.count} {each.kind}" for each in found)
    raise UserError(
        f"{goal.texts_per_s:.4g} texts per second: {devices} sustain about "
        f"{sum(each.on(each.count) for each in found):.4g} within {_limits(goal)}"
    )


def _cost_per_hour(found: Sequence[_OfKind], counts: Sequence[int]) -> float:
    return sum(count * each.facts.device.price_per_hour for each, count in zip(found, counts, strict=True))


def _enough(found: Sequence[_OfKind], texts_per_s: float) -> Iterator[tuple[int, ...]]:
    """How many devices of each kind may sustain a rate: none of them is left out that could be."""
    *others, last = found
    for counts in product(*(range(each.count + 1) for each in others)):
        left = texts_per_s - sum(count * each.most_per_s for count, each in zip(counts, others, strict=True))
        for more in range(max(0, ceil(left / last.most_per_s)), last.count + 1):
            yield *counts, more


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
