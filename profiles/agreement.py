"""How often answers equal the full network's, estimated from audits.

An audit is an input that is answered at a ramp and still runs to the end, so that both answers can be compared. Audits
are drawn before anything is known of the inputs, but some never reach the end, and their number depends on the block
after which they were answered. So the audits of each block are weighted by the share of all answers that left after
that block: dropped audits do not bias the estimate.

The interval is a confidence sequence: it stays valid however often it is read. A fixed mixture of bets is placed
against each share p of disagreement. The interval holds every p against which the mixture has not yet multiplied its
stake by 1 / (1 - confidence). The mixture is that of all Bernoulli shares, weighted by PRIOR. It is also valid for
weighted audits, whose misses count for anything from 0 to 1 (Waudby-Smith and Ramdas, 2023).

An interval shows a broken promise late, as it also counts the long time in which the promise was kept. So a score
watches for breaks, look by look, as CUSUM does: the logarithm of the winnings of a bet against the promise. A miss adds
log 2; a hit subtracts as much as keeps the average at 0 while the promise is just kept; the score never falls below 0.
At log 100 the promise is broken: with five times as many disagreements as promised, that takes some 190 audits, while a
promise that is kept raises a false alarm once in hundreds of thousands of audits.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf, lgamma, log, log1p, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# A beta distribution of shares of disagreement, with a mean of about 1.6 % and the weight of 30 audits.
PRIOR = 0.5, 30.0
# Audits: blocks with fewer are counted together with their neighbours, since their own weights would be chance.
MIN_AUDITS_PER_PART = 50
MIN_AUDITS = 100  # audits: with fewer, the state of a promise is "not watched"
BISECTION_STEPS = 40  # bisection steps for one end of an interval
WATCHED_S = 600.0  # seconds: audits older than this are forgotten
# The score at which a promise counts as broken, and the one that is enough while inputs are in doubt.
ALARM = log(100.0)
DOUBT_ALARM = log(10.0)
# What each further watch adds to a sum of scores by chance: by simulation, a kept promise then raises as few alarms by
# the sum as by one watch.
BY_CHANCE = 1.5
DOUBT_ALLOWANCE = 0.8  # while inputs are in doubt, only this share of the promised disagreement may be used
# Inputs count as changed when their mean depth moves by this many standard errors and by this share of the depth.
CHANGED_ERRORS = 5.0
CHANGED_SHARE = 0.05
MIN_ANSWERS = 500  # answers: a mean depth of fewer is not compared

PromiseState = Literal["kept", "broken", "not watched"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """The share of answers that are the full network's: an estimate, and its 95 % interval from `low` to `high`."""

    share: float
    low: float
    high: float
    audits: int

    def verdict(self, promised: float) -> PromiseState:
        """Whether a promised share is kept: "broken" only if the whole interval lies below it.

        >>> Agreement(0.993, 0.989, 0.996, 2140).verdict(0.99), Agreement(0.97, 0.95, 0.98, 2140).verdict(0.99)
        ('kept', 'broken')
        """
        if self.audits < MIN_AUDITS:
            return "not watched"
        return "broken" if self.high < promised else "kept"

    def __str__(self) -> str:
        """
        >>> print(Agreement(0.993, 0.989, 0.996, 2140))
        agreement 99.3 % (98.9 to 99.6, 2,140 audits)
        """
        between = f"{100 * self.low:.1f} to {100 * self.high:.1f}"
        return f"agreement {100 * self.share:.1f} % ({between}, {self.audits:,} audits)"


def agreement_text(recent: "RecentAgreement", promised: float | None, total: Agreement | None = None) -> str:
    """One line for people: the agreement of the last minutes, the `total` one since the start, and the promise.

    >>> now, total = Agreement(0.991, 0.979, 0.996, 240), Agreement(0.993, 0.989, 0.996, 2140)
    >>> agreement_text(RecentAgreement(now, "kept"), 0.99)
    'agreement 99.1 % (97.9 to 99.6, 240 audits), promise 99 %: kept'
    >>> agreement_text(RecentAgreement(None, "not watched"), 0.99), agreement_text(RecentAgreement(None, None), None)
    ('no audits yet, promise 99 %: not watched', 'no audits yet')
    >>> agreement_text(RecentAgreement(now, None), None, total)
    'agreement 99.1 % (97.9 to 99.6, 240 audits) in ten minutes, 99.3 % (98.9 to 99.6, 2,140 audits) since the start'
    >>> agreement_text(RecentAgreement(None, None), None, total)
    'no audits in ten minutes, agreement 99.3 % (98.9 to 99.6, 2,140 audits) since the start'
    """
    if total is None:
        text = str(recent.agreement) if recent.agreement else "no audits yet"
    elif recent.agreement:
        text = f"{recent.agreement} in ten minutes, {str(total).removeprefix('agreement ')} since the start"
    else:
        text = f"no audits in ten minutes, {total} since the start"
    return text if promised is None else f"{text}, promise {100 * promised:.4g} %: {recent.state}"


def bounds(misses: float, audits: int, confidence: float) -> tuple[float, float]:
    """The interval of the share of misses, for a sum of `misses` (each from 0 to 1) in `audits`.

    >>> low, high = bounds(15.0, 2140, 0.95)
    >>> round(100 * low, 2), round(100 * high, 2)
    (0.27, 1.43)
    """
    hits, limit = audits - misses, -np.log(1 - confidence)
    evidence = _log_beta(misses + PRIOR[0], hits + PRIOR[1]) - _log_beta(*PRIOR)

    def refuted(share: float) -> bool:
        return bool(evidence - misses * np.log(share) - hits * np.log1p(-share) >= limit)

    middle = min(max(misses / audits, 1e-12), 1 - 1e-12)
    low = _edge(middle, 1e-15, refuted) if misses else 0.0
    high = _edge(middle, 1 - 1e-15, refuted) if hits else 1.0
    return low, high


def _log_beta(first: float, second: float) -> float:
    """The logarithm of the beta function. `scipy.special` has it too, but each front would import it for 0.2 s."""
    return lgamma(first) + lgamma(second) - lgamma(first + second)


def _edge(inside: float, outside: float, refuted: Callable[[float], bool]) -> float:
    """The first refuted share on the way from `inside` to `outside`, by bisection."""
    for _ in range(BISECTION_STEPS):
        between = (inside + outside) / 2
        inside, outside = (inside, between) if refuted(between) else (between, outside)
    return outside


@dataclass(frozen=True)
class AuditedAnswers:
    """Counts of the answers that could disagree, by the block they left after: all, `audited` ones, `missed` ones.

    An answer could disagree if its input passed an open ramp at which it might have left. An answer after the last
    block agrees.
    """

    left: tuple[int, ...] = ()
    audited: tuple[int, ...] = ()
    missed: tuple[int, ...] = ()

    def agreement(self, confidence: float = 0.95) -> Agreement | None:
        """None without an audit, or where no answer left early."""
        if (weighted := self._weighted()) is None:
            return None
        audits, misses, most = weighted
        share_early = sum(self.left[:-1]) / sum(self.left)
        low, high = bounds(misses / most, audits, confidence)
        off = [min(1.0, share_early * each) for each in (misses / audits, most * low, most * high)]
        return Agreement(1 - off[0], 1 - off[2], 1 - off[1], audits)

    def _weighted(self) -> tuple[int, float, float] | None:
        """The number of audits, the weighted sum of their misses, and the largest weight; None where nothing is known.

        Neighbouring blocks with few audits are weighted as one part.
        """
        early_left, audits = sum(self.left[:-1]), sum(self.audited[:-1])
        if not audits or not early_left:  # an audit may end when no other input leaves early any more
            return None
        parts, sums = list[Floats](), np.zeros(3)
        for counts in np.array([self.left, self.audited, self.missed], np.float64).T[:-1]:
            sums = sums + counts
            if sums[1] >= MIN_AUDITS_PER_PART:
                parts, sums = [*parts, sums], np.zeros(3)
        parts = [*parts[:-1], parts[-1] + sums] if parts else [sums]
        left, audited, missed = np.array(parts).T
        weights: Floats = (left / left.sum()) / (audited / audited.sum())
        return audits, float((weights * missed).sum()), float(weights.max())

    def since(self, before: "AuditedAnswers") -> "AuditedAnswers":
        """The counts that were added since an earlier state of the same counts.

        >>> AuditedAnswers((5, 9), (2, 0), (1, 0)).since(AuditedAnswers((3, 9), (2, 0), (0, 0)))
        AuditedAnswers(left=(2, 0), audited=(0, 0), missed=(1, 0))
        """
        pairs = (self.left, before.left), (self.audited, before.audited), (self.missed, before.missed)
        return AuditedAnswers(*(tuple(now - then for now, then in zip_longest(*pair, fillvalue=0)) for pair in pairs))

    def score_gain(self, limit: float) -> float | None:
        """What these audits add to the score against a disagreement of at most `limit`; None: nothing is known.

        The audits stand for all answers, of which those after the last block are hits.
        """
        if (weighted := self._weighted()) is None:
            return None
        audits, misses, _ = weighted
        hits = audits * sum(self.left) / sum(self.left[:-1]) - misses
        if limit < 1 / 3:
            return misses * log(2.0) + hits * log1p(-limit / (1 - limit))
        return misses * log((1 + 1 / limit) / 2) + hits * log(0.5)  # doubling would not be a fair bet here

    @property
    def depth(self) -> tuple[float, float] | None:
        """How many blocks inputs ran on average, and the variance of that mean; None below MIN_ANSWERS."""
        if (answered := sum(self.left)) < MIN_ANSWERS:
            return None
        mean = sum(count * blocks for blocks, count in enumerate(self.left, 1)) / answered
        square = sum(count * blocks * blocks for blocks, count in enumerate(self.left, 1)) / answered
        return mean, (square - mean * mean) / answered


def summed(parts: Iterable[AuditedAnswers]) -> AuditedAnswers:
    """
    >>> summed([AuditedAnswers((1, 2), (1, 0), (0, 0)), AuditedAnswers(), AuditedAnswers((3, 4), (0, 0), (1, 0))])
    AuditedAnswers(left=(4, 6), audited=(1, 0), missed=(1, 0))
    """
    columns = list(zip(*((each.left, each.audited, each.missed) for each in parts), strict=True))
    return AuditedAnswers(*(tuple(map(sum, zip_longest(*column, fillvalue=0))) for column in columns))


class Look(NamedTuple):
    """The answers counted until `ended_s` with the same open ramps, the score then, and the score of an alarm."""

    ended_s: float
    answers: AuditedAnswers
    ramps: object
    score: float
    alarm: float


@dataclass
class PromiseWatch:
    """Remembers ten minutes of audits, look by look, and keeps the score against the promise.

    Inputs are in doubt for ten minutes after the promise broke, and after inputs begin to leave elsewhere than minutes
    before. All answers show such a change, long before the few audits do. In doubt, less disagreement is allowed and a
    lower score is an alarm.
    """

    looks: deque[Look] = field(default_factory=deque)
    score: float = 0.0
    scored: AuditedAnswers = AuditedAnswers()  # since the score was last 0
    _unscored: AuditedAnswers = AuditedAnswers()  # audits that are not in the score yet
    _stale: int = 0  # looks from before thresholds changed
    _doubted_s: float = -inf

    def count(self, answers: AuditedAnswers, ended_s: float, promised: float | None, ramps: object = None) -> None:
        """Add a look, and score it where something is promised. Looks of a later time are from before the clock was set
        back: they are forgotten, as their time may never end."""
        while self.looks and self.looks[-1].ended_s > ended_s:
            self.looks.pop()
        self._stale, self._doubted_s = min(self._stale, len(self.looks)), min(self._doubted_s, ended_s)
        in_doubt = self.in_doubt(ended_s)
        if promised is not None:
            self._score(answers, (1 - promised) * (DOUBT_ALLOWANCE if in_doubt else 1.0))
        self.looks.append(Look(ended_s, answers, ramps, self.score, DOUBT_ALARM if in_doubt else ALARM))
        while self.looks[0].ended_s < ended_s - WATCHED_S:
            self.looks.popleft()
            self._stale = max(0, self._stale - 1)

    def follow(self, answers: AuditedAnswers, ended_s: float, promised: float | None, ramps: object = None) -> None:
        """Add a look where no controller acts on it: doubt begins by itself, and an alarm resets the score."""
        self.count(answers, ended_s, promised, ramps)
        if self.is_alarmed:
            self.reset_score()
            self.doubt(ended_s)
        elif self.depth_change():
            self.doubt(ended_s)

    @property
    def is_alarmed(self) -> bool:
        """Whether the promise is broken, by the latest look."""
        return bool(self.looks) and self.looks[-1].score >= self.looks[-1].alarm

    def reset_score(self) -> None:
        self.score, self.scored = 0.0, AuditedAnswers()

    def restart(self) -> None:
        """Forget earlier audits, which were of other thresholds."""
        self.reset_score()
        self._unscored = AuditedAnswers()
        self._stale = len(self.looks)

    def doubt(self, now_s: float) -> None:
        self._doubted_s = now_s

    def in_doubt(self, now_s: float) -> bool:
        return now_s - self._doubted_s < WATCHED_S

    def depth_change(self) -> str:
        """One sentence on how much deeper or less deep inputs run than minutes before; empty if it may be chance."""
        fresh = self._fresh()
        answers = [look.answers for look in fresh if look.ramps == fresh[-1].ramps]  # other ramps, other depths
        before, now = summed(answers[:-2][:4]).depth, summed(answers[-2:]).depth
        if not before or not now:
            return ""
        off, error = now[0] - before[0], sqrt(before[1] + now[1])
        if abs(off) < max(CHANGED_ERRORS * error, CHANGED_SHARE * before[0]):
            return ""
        return f"inputs run {now[0]:.2f} blocks on average, {before[0]:.2f} minutes ago: the inputs have changed"

    def recent(self, now_s: float) -> AuditedAnswers:
        """The answers of the last ten minutes, since thresholds changed."""
        return summed(look.answers for look in self._fresh() if look.ended_s >= now_s - WATCHED_S)

    def copy(self) -> "PromiseWatch":
        return replace(self, looks=deque(self.looks))

    def _fresh(self) -> list[Look]:
        return list(self.looks)[self._stale :]

    def _score(self, answers: AuditedAnswers, limit: float) -> None:
        """Add audits to the score. Audits end after their answers, so those of a look without early answers wait."""
        answers = summed([self._unscored, answers])
        gain = answers.score_gain(limit)
        self._unscored = answers if gain is None and any(answers.audited) else AuditedAnswers()
        if gain is None:
            return
        self.score = min(self.score + gain, ALARM)  # where no controller acts on an alarm, it grows no further
        self.scored = summed([self.scored, answers])
        if self.score <= 0.0:
            self.reset_score()


class RecentAgreement(NamedTuple):
    """The agreement of the last ten minutes, since thresholds changed, and the state of the promise."""

    agreement: Agreement | None
    state: PromiseState | None  # None: nothing is promised


def recent_agreement(watches: Sequence[PromiseWatch], now_s: float, promised: float | None = None) -> RecentAgreement:
    """The agreement and the state of the promise by several watches, each of a part of the answers.

    A promise counts as broken for ten minutes after an alarm, even if thresholds have changed since. An alarm is that
    of one watch, or of the sum of all scores at one time. As no score falls below 0, this sum is the larger by chance,
    the more watches there are.
    """
    agreement = summed(watch.recent(now_s) for watch in watches).agreement()
    if promised is None:
        return RecentAgreement(agreement, None)
    together = defaultdict[float, list[Look]](list)
    for look in (look for watch in watches for look in list(watch.looks) if look.ended_s >= now_s - WATCHED_S):
        together[look.ended_s].append(look)
    if any(map(_is_alarm, together.values())):
        return RecentAgreement(agreement, "broken")
    return RecentAgreement(agreement, agreement.verdict(promised) if agreement else "not watched")


def _is_alarm(looks: Sequence[Look]) -> bool:
    """Whether the looks of several watches at one time are an alarm, of one of them or of all together."""
    alarm = min(look.alarm for look in looks) + BY_CHANCE * (len(looks) - 1)
    return any(look.score >= look.alarm for look in looks) or sum(look.score for look in looks) >= alarm
