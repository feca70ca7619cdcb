"""How often answers are those of the full network, as far as audits tell.

An audit is an input that is answered at a ramp and runs on to the end all the same. Which inputs are audited is drawn
before anything is known of them, but some never get to the end, and how many depends on where they were answered. So
the audits of each block count as much as all answers of that block do: the estimate is unbiased whatever is given up.

The interval may be looked at again and again, at any time: it is a confidence sequence. A share p of disagreement is
inside as long as no bet against it, of a fixed mixture of bets, has made 1 / doubt of what it began with. The mixture
is that of all Bernoulli shares, weighed by PRIOR; it keeps its word for weighted audits too, whose misses count for
anything from 0 to 1 (Waudby-Smith and Ramdas, 2023).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lgamma
from typing import Literal

import numpy as np
from numpy.typing import NDArray

PRIOR = 0.5, 30.0  # of a beta distribution: about 1.6 %, and hardly sure of it
TOGETHER = 50  # audits: blocks with fewer are counted with their neighbours, or their weights would be chance
LEAST = 100  # audits, before anything is said of a promise
STEPS = 40

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


def said(agreement: Agreement | None, promised: float | None) -> str:
    """What audits tell of a promise, in one line.

    >>> said(Agreement(0.993, 0.989, 0.996, 2140), 0.99)
    'agreement 99.3 % (98.9 to 99.6, 2,140 audits), promise 99 %: kept'
    >>> said(None, 0.99), said(None, None)
    ('no audits yet, promise 99 %: not watched', 'no audits yet')
    """
    seen = str(agreement) if agreement else "no audits yet"
    if promised is None:
        return seen
    return f"{seen}, promise {100 * promised:.4g} %: {verdict(agreement, promised)}"


def verdict(agreement: Agreement | None, promised: float) -> PromiseState:
    """What is known of a promise, with audits or without any."""
    return agreement.verdict(promised) if agreement else "not watched"


def agreement_of(
    left: Sequence[int], audited: Sequence[int], missed: Sequence[int], confidence: float = 0.95
) -> Agreement | None:
    """The agreement of answers of which so many left after each block; None without an audit, or where none left early.

    So many of those were `audited` to the end, which disagreed with what `missed` of them had been told. Who ran to
    the last block agrees.
    """
    early = [_float(counts)[:-1] for counts in (left, audited, missed)]
    audits = int(early[1].sum())
    if not audits or not early[0].sum():  # an audit may end when nobody else leaves early any more
        return None
    weights, missing = _weighed(*early)
    share_early, most = float(early[0].sum() / sum(left)), float(weights.max())
    estimate = float((weights * missing).sum()) / audits
    low, high = bounds(estimate * audits / most, audits, confidence)
    off = [min(1.0, share_early * each) for each in (estimate, most * low, most * high)]
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


def _weighed(left: Floats, audited: Floats, missed: Floats) -> tuple[Floats, Floats]:
    """For each part of the blocks: what an audit counts for, and how many audits missed. Parts are of neighbours."""
    parts, sums = list[Floats](), np.zeros(3)
    for counts in np.stack((left, audited, missed), axis=1):
        sums = sums + counts
        if sums[1] >= TOGETHER:
            parts, sums = [*parts, sums], np.zeros(3)
    if not parts:
        parts = [sums]
    else:
        parts[-1] = parts[-1] + sums
    each = np.array(parts)
    weights: Floats = (each[:, 0] / each[:, 0].sum()) / (each[:, 1] / each[:, 1].sum())
    return weights, each[:, 2]


def _float(counts: Sequence[int]) -> Floats:
    return np.asarray(counts, np.float64)
