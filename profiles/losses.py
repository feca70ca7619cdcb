"""What inputs lose by leaving early, in the metric that is promised, and how surely so many of them show it.

- accuracy: right answers, of all inputs. agreement: answers that are the full network's.
- worst-class: right answers of the inputs of one class, whichever class loses most. It has a loss a class, and all of
  them must be small: where one is not, its test alone fails as often as it should.
- macro-f1, mcc: one score of all inputs, not a mean over them. Its loss and its standard error come from what each
  input adds to the score (its influence, to first order), which holds for many inputs, not for any number.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Metric = Literal["accuracy", "agreement", "worst-class", "macro-f1", "mcc"]
Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
Labels = NDArray[np.integer[Any]]

NAMES: Mapping[Metric, str] = {
    "accuracy": "accuracy",
    "agreement": "agreement",
    "worst-class": "any class's recall",
    "macro-f1": "macro-F1",
    "mcc": "MCC",
}
OF_ALL: tuple[Metric, ...] = ("accuracy", "agreement")  # means over all inputs; the others count by classes
ROUNDING = 1e-9
STEADY = 1.96  # standard errors of an interval that holds 95 %


@dataclass(frozen=True)
class Interval:
    """A mean, and how far from it the truth may lie (95 %)."""

    mean: float
    within: float

    @classmethod
    def of(cls, mean: float, error: float) -> "Interval":
        """By its standard error."""
        return cls(float(mean), float(STEADY * error))

    def __str__(self) -> str:
        """
        >>> str(Interval(0.123, 0.0149))
        '12.3 ± 1.5 %'
        """
        return f"{100 * self.mean:.1f} ± {100 * self.within:.1f} %"


@dataclass(frozen=True)
class ScoreFigures:
    """A score of the full network, of the one with exits, and what exits cost."""

    full: Interval
    exits: Interval
    lost: Interval


@dataclass(frozen=True)
class EntityF1(ScoreFigures):
    """Of so many entities."""

    entities: int

    def __str__(self) -> str:
        """
        >>> print(EntityF1(Interval(0.9, 0.01), Interval(0.89, 0.01), Interval(0.01, 0.005), 1200))
        1,200 entities: F1 90.0 ± 1.0 % in full, 89.0 ± 1.0 % with exits, lost by exits 1.0 ± 0.5 %
        """
        return f"{self.entities:,} entities: F1 {self.full} in full, {self.exits} with exits, lost by exits {self.lost}"


@dataclass(frozen=True)
class Loss:
    """What some inputs lose on average by leaving early, what others win taken off; or many such means at once.

    `weight`: what one input can lose, where it is not 1: a rare class weighs more in some scores.
    """

    mean: Any
    mean_square: Any
    count: int
    weight: float = 1.0

    @property
    def error(self) -> Any:
        """The standard error. One loss more than was seen is assumed: none in 50 inputs is no proof of none."""
        unseen = self.weight**2 / self.count
        return np.sqrt((np.maximum(self.mean_square - self.mean**2, 0.0) + unseen) / self.count)

    @property
    def counted(self) -> int:
        """As many inputs of weight 1 show as much."""
        return max(1, int(self.count / self.weight + ROUNDING))

    def within(self, max_loss: float, margin: float) -> Any:
        """Whether the mean and so many standard errors are no more than this."""
        return self.mean + margin * self.error <= max_loss + ROUNDING


def mean_loss(lost: Floats) -> Loss:
    """Of what each input loses: 1, 0, or -1 if it wins."""
    return Loss(float(lost.mean()), float((lost**2).mean()), len(lost))


def losses_by_class(lost: Floats, truth: Labels) -> tuple[Loss, ...]:
    """One for each class that occurs."""
    return tuple(mean_loss(lost[truth == label]) for label in np.unique(truth))


def balancing(truth: Labels) -> Floats:
    """Weights of the inputs by which all classes that occur weigh the same; their mean is 1."""
    counts = np.bincount(truth)
    weights: Floats = len(truth) / (np.count_nonzero(counts) * counts[truth])
    return weights


@dataclass(frozen=True)
class ClassScore:
    """A score of answers, and by how much an input of a class that is answered so raises it (class x answer)."""

    value: float
    influence: Floats


def score_loss(metric: Metric, truth: Labels, full: Labels, exits: Labels) -> Loss:
    """What a score loses from the answers of the full network to those with exits."""
    score, size = SCORES[metric], 1 + int(max(truth.max(), full.max(), exits.max()))
    before, after = (score(_shares(truth, said, size)) for said in (full, exits))
    drifts = before.influence[truth, full] - after.influence[truth, exits]
    mean = before.value - after.value
    most = (before.influence.diagonal() - before.influence.min(axis=1))[np.unique(truth)].max()
    return Loss(mean, mean**2 + float(drifts.var()), len(truth), _rounded_up(float(most)))


def _rounded_up(weight: float) -> float:
    """To a power of 1.1, and at least 1: every other weight needs another margin, which takes half a second to find.

    >>> _rounded_up(0.3), round(_rounded_up(1.2), 6)
    (1.0, 1.21)
    """
    return float(1.1 ** math.ceil(math.log(max(weight, 1.0), 1.1) - ROUNDING))


def scored(metric: Metric, truth: Labels, said: Labels) -> tuple[float, float]:
    """A score of answers, and its standard error."""
    score = SCORES[metric](_shares(truth, said, 1 + int(max(truth.max(), said.max()))))
    return score.value, float(score.influence[truth, said].std() / len(truth) ** 0.5)


def _shares(truth: Labels, said: Labels, size: int) -> Floats:
    """Class x answer: the share of all inputs that are of this class and answered so."""
    pairs = truth.astype(np.int64) * size + said
    shares: Floats = np.bincount(pairs, minlength=size * size).reshape(size, size) / len(truth)
    return shares


def macro_f1(shares: Floats) -> ClassScore:
    """The mean F1 of the classes that occur.

    >>> round(macro_f1(np.array([[0.4, 0.1], [0.1, 0.4]])).value, 9)
    0.8
    """
    occurs = shares.sum(axis=1) > 0
    both = np.where(occurs, shares.sum(axis=0) + shares.sum(axis=1), 1.0)
    each = np.where(occurs, 2 * shares.diagonal() / both, 0.0)
    per_input = np.where(occurs, each / both, 0.0)
    influence = np.diag(np.where(occurs, 2 / both, 0.0)) - per_input[:, None] - per_input[None, :]
    return ClassScore(float(each.sum() / occurs.sum()), influence / occurs.sum())


def mcc(shares: Floats) -> ClassScore:
    """Matthews' correlation of answers and classes (Gorodkin's, where there are more than two).

    >>> round(mcc(np.array([[0.4, 0.1], [0.1, 0.4]])).value, 9)
    0.6
    """
    truth, said = shares.sum(axis=1), shares.sum(axis=0)
    right, chance = float(shares.trace()), float(truth @ said)
    spread = (1 - truth @ truth) * (1 - said @ said)
    if spread <= 0:  # one class, or one answer: there is nothing to correlate
        return ClassScore(0.0, np.zeros_like(shares))
    value = (right - chance) / np.sqrt(spread)
    numerator = np.eye(len(shares)) - right - (said[:, None] - chance) - (truth[None, :] - chance)
    width = (truth @ truth - truth)[:, None] / (1 - truth @ truth) + (said @ said - said)[None, :] / (1 - said @ said)
    return ClassScore(float(value), numerator / np.sqrt(spread) - value * width)


SCORES: Mapping[str, Callable[[Floats], ClassScore]] = {"macro-f1": macro_f1, "mcc": mcc}
