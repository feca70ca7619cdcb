"""How often answers are those of the full network, as far as audits tell.

An audit is an input that is answered at a ramp and runs on to the end all the same. Which inputs are audited is drawn
before anything is known of them, but some never get to the end, and how many depends on where they were answered. So
the audits of each block count as much as all answers of that block do: the estimate is unbiased whatever is given up.

The interval may be looked at again and again, at any time: it is a confidence sequence. A share p of disagreement is
inside as long as no bet against it, of a fixed mixture of bets, has made 1 / doubt of what it began with. The mixture
is that of all Bernoulli shares, weighed by PRIOR; it keeps its word for weighted audits too, whose misses count for
anything from 0 to 1 (Waudby-Smith and Ramdas, 2023).

An interval is slow to say that a promise broke, as it knows all that went well before. A purse is fast: it bets against
the promise look by look. A miss doubles it, a hit takes so much away that a promise that just holds gains nothing, and
it never falls below 1. At 100 the promise is broken: where five times too many answers disagree, that takes some 190
audits, while a promise that is kept is said to be broken once in hundreds of thousands.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf, lgamma, log, log1p, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

PRIOR = 0.5, 30.0  # of a beta distribution: about 1.6 %, and hardly sure of it
TOGETHER = 50  # audits: blocks with fewer are counted with their neighbours, or their weights would be chance
LEAST = 100  # audits, before anything is said of a promise
STEPS = 40
WATCHED_S = 600.0  # what was seen longer ago tells nothing of now
ALARM, DOUBTED = log(100.0), log(10.0)  # what the purse must hold, and where inputs are doubted
ENOUGH = 0.8  # of what is allowed is what may be lost of inputs that are doubted
ODD, SHARE, ENOUGH_ANSWERS = 5.0, 0.05, 500  # standard errors, and a share of the blocks: inputs are others than before

PromiseState = Literal["kept", "broken", "not watched"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """The share of answers that are the full network's: an estimate, between `low` and `high` with 95 % confidence."""

    share: float
    low: float
    high: float
    audits: int

    def verdict(self, promised: float) -> PromiseState:
        """`kept`: nothing speaks against it.

        >>> Agreement(0.993, 0.989, 0.996, 2140).verdict(0.99), Agreement(0.97, 0.95, 0.98, 2140).verdict(0.99)
        ('kept', 'broken')
        """
        if self.audits < LEAST:
            return "not watched"
        return "broken" if self.high < promised else "kept"

    def __str__(self) -> str:
        """
        >>> print(Agreement(0.993, 0.989, 0.996, 2140))
        agreement 99.3 % (98.9 to 99.6, 2,140 audits)
        """
        between = f"{100 * self.low:.1f} to {100 * self.high:.1f}"
        return f"agreement {100 * self.share:.1f} % ({between}, {self.audits:,} audits)"


def said(seen: "RecentAgreement", promised: float | None, total: Agreement | None = None) -> str:
    """What audits tell of a promise, in one line: in the last minutes, and beside that in `total`, since the start.

    >>> now, total = Agreement(0.991, 0.979, 0.996, 240), Agreement(0.993, 0.989, 0.996, 2140)
    >>> said(RecentAgreement(now, "kept"), 0.99)
    'agreement 99.1 % (97.9 to 99.6, 240 audits), promise 99 %: kept'
    >>> said(RecentAgreement(None, "not watched"), 0.99), said(RecentAgreement(None, None), None)
    ('no audits yet, promise 99 %: not watched', 'no audits yet')
    >>> said(RecentAgreement(now, None), None, total)
    'agreement 99.1 % (97.9 to 99.6, 240 audits) in ten minutes, 99.3 % (98.9 to 99.6, 2,140 audits) since the start'
    >>> said(RecentAgreement(None, None), None, total)
    'no audits in ten minutes, agreement 99.3 % (98.9 to 99.6, 2,140 audits) since the start'
    """
    if total is None:
        known = str(seen.agreement) if seen.agreement else "no audits yet"
    elif seen.agreement:
        known = f"{seen.agreement} in ten minutes, {str(total).removeprefix('agreement ')} since the start"
    else:
        known = f"no audits in ten minutes, {total} since the start"
    return known if promised is None else f"{known}, promise {100 * promised:.4g} %: {seen.state}"


def agreement_of(
    left: Sequence[int], audited: Sequence[int], missed: Sequence[int], confidence: float = 0.95
) -> Agreement | None:
    """The agreement of answers of which so many left after each block; None without an audit, or where none left early.

    So many of those were `audited` to the end, which disagreed with what `missed` of them had been told. Who ran to
    the last block agrees.
    """
    if (found := _weighed(left, audited, missed)) is None:
        return None
    audits, misses, most = found
    share_early = sum(left[:-1]) / sum(left)
    low, high = bounds(misses / most, audits, confidence)
    off = [min(1.0, share_early * each) for each in (misses / audits, most * low, most * high)]
    return Agreement(1 - off[0], 1 - off[2], 1 - off[1], audits)


def bounds(misses: float, audits: int, confidence: float) -> tuple[float, float]:
    """The shares that so many misses (each from 0 to 1) in so many audits do not speak against.

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
    """The logarithm of the beta function; `scipy.special` knows it too, but takes each front 0.2 s to import."""
    return lgamma(first) + lgamma(second) - lgamma(first + second)


def _edge(inside: float, outside: float, refuted: Callable[[float], bool]) -> float:
    """The first share from the one inside towards the one outside that is refuted."""
    for _ in range(STEPS):
        between = (inside + outside) / 2
        inside, outside = (inside, between) if refuted(between) else (between, outside)
    return outside


def _weighed(left: Sequence[int], audited: Sequence[int], missed: Sequence[int]) -> tuple[int, float, float] | None:
    """Audits, the misses among them as they count, and what a miss counts at most; None where nothing is known.

    Parts of the blocks are weighed, each of neighbours.
    """
    early = [_float(counts)[:-1] for counts in (left, audited, missed)]
    audits = int(early[1].sum())
    if not audits or not early[0].sum():  # an audit may end when nobody else leaves early any more
        return None
    parts, sums = list[Floats](), np.zeros(3)
    for counts in np.stack(early, axis=1):
        sums = sums + counts
        if sums[1] >= TOGETHER:
            parts, sums = [*parts, sums], np.zeros(3)
    if not parts:
        parts = [sums]
    else:
        parts[-1] = parts[-1] + sums
    each = np.array(parts)
    weights: Floats = (each[:, 0] / each[:, 0].sum()) / (each[:, 1] / each[:, 1].sum())
    return audits, float((weights * each[:, 2]).sum()), float(weights.max())


def _float(counts: Sequence[int]) -> Floats:
    return np.asarray(counts, np.float64)


@dataclass(frozen=True)
class AuditedAnswers:
    """Answers that could disagree, by the block they left after, and what audits told of them: how many `missed`.

    An answer could disagree if its input passed an open ramp that might have let it go.
    """

    left: tuple[int, ...] = ()
    audited: tuple[int, ...] = ()
    missed: tuple[int, ...] = ()

    def agreement(self) -> Agreement | None:
        return agreement_of(self.left, self.audited, self.missed) if any(self.audited) else None

    def since(self, before: "AuditedAnswers") -> "AuditedAnswers":
        """What is new of what only grows.

        >>> AuditedAnswers((5, 9), (2, 0), (1, 0)).since(AuditedAnswers((3, 9), (2, 0), (0, 0)))
        AuditedAnswers(left=(2, 0), audited=(0, 0), missed=(1, 0))
        """
        now, then = (self.left, self.audited, self.missed), (before.left, before.audited, before.missed)
        return AuditedAnswers(*(_more(late, early) for late, early in zip(now, then, strict=True)))

    def won(self, limit: float) -> float | None:
        """By what the logarithm of a purse grows that bets against a disagreement of `limit`; None: nothing is known.

        So many of all answers were audited, of which those that ran to the last block are hits.
        """
        if not any(self.audited) or (found := _weighed(self.left, self.audited, self.missed)) is None:
            return None
        audits, misses, _ = found
        hits = audits * sum(self.left) / sum(self.left[:-1]) - misses
        if limit < 1 / 3:
            return misses * log(2.0) + hits * log1p(-limit / (1 - limit))
        return misses * log((1 + 1 / limit) / 2) + hits * log(0.5)  # as fair, where to double would not be

    @property
    def depth(self) -> tuple[float, float] | None:
        """How many blocks inputs ran on average, and the variance of that; None where too few were answered."""
        if (answered := sum(self.left)) < ENOUGH_ANSWERS:
            return None
        mean = sum(count * ran for ran, count in enumerate(self.left, 1)) / answered
        square = sum(count * ran * ran for ran, count in enumerate(self.left, 1)) / answered
        return mean, (square - mean * mean) / answered


def added(parts: Iterable[AuditedAnswers]) -> AuditedAnswers:
    """
    >>> added([AuditedAnswers((1, 2), (1, 0), (0, 0)), AuditedAnswers(), AuditedAnswers((3, 4), (0, 0), (1, 0))])
    AuditedAnswers(left=(4, 6), audited=(1, 0), missed=(1, 0))
    """
    columns = list(zip(*((each.left, each.audited, each.missed) for each in parts), strict=True))
    return AuditedAnswers(*(tuple(map(sum, zip_longest(*column, fillvalue=0))) for column in columns))


def _more(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(late - early for late, early in zip_longest(now, before, fillvalue=0))


class Look(NamedTuple):
    """What was seen until some time, behind the same open ramps; the logarithm of the purse then, and of the alarm."""

    ended_s: float
    seen: AuditedAnswers
    ramps: object
    held: float
    alarm: float


@dataclass
class PromiseWatch:
    """Looks at audits again and again: remembers ten minutes of them, and bets against the promise.

    Inputs are doubted for ten minutes where the promise has broken, and where they leave elsewhere than minutes before,
    which all answers tell, long before audits of a few do. Then the purse bets against less, and the alarm is at 10.
    """

    looks: deque[Look] = field(default_factory=deque)
    held: float = 0.0  # the logarithm of the purse
    bet: AuditedAnswers = AuditedAnswers()  # since the purse was last 1
    _unbet: AuditedAnswers = AuditedAnswers()  # audits that are not in the purse yet
    _stale: int = 0  # looks from before thresholds changed
    _doubted_s: float = -inf

    def count(self, seen: AuditedAnswers, ended_s: float, promised: float | None, ramps: object = None) -> None:
        """Count a look in, and bet on it where something is promised."""
        in_doubt = self.in_doubt(ended_s)
        if promised is not None:
            self._bet(seen, (1 - promised) * (ENOUGH if in_doubt else 1.0))
        self.looks.append(Look(ended_s, seen, ramps, self.held, DOUBTED if in_doubt else ALARM))
        while self.looks[0].ended_s < ended_s - WATCHED_S:
            self.looks.popleft()
            self._stale = max(0, self._stale - 1)

    def follow(self, seen: AuditedAnswers, ended_s: float, promised: float | None, ramps: object = None) -> None:
        """The same where nobody acts on what is found: doubt begins, and after an alarm the purse is 1 again."""
        self.count(seen, ended_s, promised, ramps)
        if self.is_alarmed:
            self.settle()
            self.doubt(ended_s)
        elif self.moved():
            self.doubt(ended_s)

    @property
    def is_alarmed(self) -> bool:
        """Whether the latest look says that the promise is broken."""
        return bool(self.looks) and self.looks[-1].held >= self.looks[-1].alarm

    def settle(self) -> None:
        """The purse is 1 again."""
        self.held, self.bet = 0.0, AuditedAnswers()

    def restart(self) -> None:
        """Thresholds have changed: what was seen before tells nothing of them."""
        self.settle()
        self._unbet = AuditedAnswers()
        self._stale = len(self.looks)

    def doubt(self, now_s: float) -> None:
        self._doubted_s = now_s

    def in_doubt(self, now_s: float) -> bool:
        return now_s - self._doubted_s < WATCHED_S

    def moved(self) -> str:
        """How far deeper or less deep inputs go than some minutes before; empty, where that may be chance."""
        fresh = self._fresh()
        looks = [look.seen for look in fresh if look.ramps == fresh[-1].ramps]  # others tell of other ramps
        before, now = added(looks[:-2][:4]).depth, added(looks[-2:]).depth
        if not before or not now:
            return ""
        off, error = now[0] - before[0], sqrt(before[1] + now[1])
        if abs(off) < max(ODD * error, SHARE * before[0]):
            return ""
        return f"inputs run {now[0]:.2f} blocks on average, {before[0]:.2f} of late: they are others"

    def seen(self, now_s: float) -> AuditedAnswers:
        """Of the last ten minutes, since thresholds changed."""
        return added(look.seen for look in self._fresh() if look.ended_s >= now_s - WATCHED_S)

    def copied(self) -> "PromiseWatch":
        return replace(self, looks=deque(self.looks))

    def _fresh(self) -> list[Look]:
        return list(self.looks)[self._stale :]

    def _bet(self, seen: AuditedAnswers, limit: float) -> None:
        """Put audits into the purse. They end after their answers: those of a look in which nobody left early wait."""
        seen = added([self._unbet, seen])
        won = seen.won(limit)
        self._unbet = seen if won is None and any(seen.audited) else AuditedAnswers()
        if won is None:
            return
        self.held = min(self.held + won, ALARM)  # where nobody acts on an alarm, it does not grow beyond
        self.bet = added([self.bet, seen])
        if self.held <= 0.0:
            self.settle()


class RecentAgreement(NamedTuple):
    """The agreement of the last ten minutes, since thresholds changed, and what is known of a promise of it."""

    agreement: Agreement | None
    state: PromiseState | None  # None: nothing is promised


def lately(watches: Sequence[PromiseWatch], now_s: float, promised: float | None = None) -> RecentAgreement:
    """What several see together, each of them a part of the answers.

    A promise is broken for ten minutes after an alarm, whatever has changed since. What all purses held at a time is
    multiplied: since none falls below 1, that is about what one would have held that had seen all, or more.
    """
    agreement = added(watch.seen(now_s) for watch in watches).agreement()
    if promised is None:
        return RecentAgreement(agreement, None)
    held, alarms = defaultdict[float, float](float), dict[float, float]()
    for look in (look for watch in watches for look in list(watch.looks) if look.ended_s >= now_s - WATCHED_S):
        held[look.ended_s] += look.held
        alarms[look.ended_s] = min(alarms.get(look.ended_s, ALARM), look.alarm)
    if any(held[at_s] >= alarm for at_s, alarm in alarms.items()):
        return RecentAgreement(agreement, "broken")
    return RecentAgreement(agreement, agreement.verdict(promised) if agreement else "not watched")
