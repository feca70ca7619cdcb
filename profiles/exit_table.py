"""Who would leave where: what recorded inputs do under any thresholds, and which thresholds make them leave earliest.

The policy itself was asked who would leave, for every ramp, candidate threshold and input. An input leaves at the first
ramp that lets it go, so cost and loss of any set of thresholds are sums over that table.

    cost(input) = what was run until it leaves + multiplier * what is lost there

For a multiplier (what accuracy is worth), thresholds are improved one ramp at a time until no change helps. The
multipliers, from high to low, give a ladder from "nobody leaves" to "as early as possible".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.losses import (
    OF_ALL,
    ROUNDING,
    SCORES,
    Floats,
    Indices,
    Labels,
    Loss,
    Metric,
    balancing,
    losses_by_class,
    mean_loss,
    score_loss,
)

MULTIPLIERS = np.geomspace(5000.0, 0.5, 161)
MAX_PASSES = 20


@dataclass(frozen=True)
class ExitTable:
    """What a policy would do with recorded inputs.

    `candidates` are thresholds, the strictest first. `first` is ramps x inputs: the first candidate at which an input
    leaves there, their number where it leaves at none. `right` and `labels` are ramps + 1 x inputs, the full network
    last: how probable it is that the answer is right (0 or 1 where labels are known), and which label it is. `truth` is
    the label of each input. `costs` is what was run at each ramp, and at the end, as a share of the whole network.

    `reference` is what another network says, which nothing may be lost against. None: the full network's own answers.
    """

    candidates: Floats
    first: NDArray[np.uint8]
    right: NDArray[np.float32]
    labels: Labels
    truth: Labels
    costs: Floats
    reference: Labels | None = None
    # Where inputs are texts of several answers each, `right` are shares of these, as `agreed` is of those that are the
    # full network's; `labels` and `truth` say nothing then.
    agreed: NDArray[np.float32] | None = None

    @property
    def num_ramps(self) -> int:
        return len(self.first)

    @property
    def num_inputs(self) -> int:
        return int(self.first.shape[1])

    @property
    def strictest(self) -> Indices:
        """The candidates that let fewest inputs leave: none, where the policy's range has such a threshold."""
        return np.zeros(self.num_ramps, np.int64)

    @property
    def agrees(self) -> NDArray[Any]:
        """Ramps + 1 x inputs: whether the answer is the full network's, or which share of its answers."""
        agrees: NDArray[Any] = self.labels == self.full_labels if self.agreed is None else self.agreed
        return agrees

    @property
    def full_labels(self) -> Labels:
        """What counts as the full network's answers."""
        labels: Labels = self.labels[-1] if self.reference is None else self.reference
        return labels

    @property
    def full_right(self) -> Floats:
        """How probable it is that those are right."""
        right = self.right[-1] if self.reference is None else self.reference == self.truth
        return np.asarray(right, np.float64)

    def of(self, chosen: Indices) -> "ExitTable":
        """These inputs only."""
        right, labels = self.right[:, chosen], self.labels[:, chosen]
        reference = None if self.reference is None else self.reference[chosen]
        agreed = None if self.agreed is None else self.agreed[:, chosen]
        made = replace(self, first=self.first[:, chosen], right=right, labels=labels, truth=self.truth[chosen])
        return replace(made, reference=reference, agreed=agreed)

    def only(self, ramps: list[int], costs: Floats) -> "ExitTable":
        """The same inputs where only these ramps are open, and what was run by then costs as much as this."""
        kept = [*ramps, self.num_ramps]
        agreed = None if self.agreed is None else self.agreed[kept]
        right, labels = self.right[kept], self.labels[kept]
        return replace(self, first=self.first[ramps], right=right, labels=labels, costs=costs[kept], agreed=agreed)

    def places(self, chosen: Indices) -> Indices:
        """The ramp where each input leaves with this candidate at each ramp; their number where at none."""
        if not self.num_ramps:
            return np.zeros(self.num_inputs, np.int64)
        leaving = self.first <= chosen[:, None]
        return np.where(leaving.any(axis=0), leaving.argmax(axis=0), self.num_ramps)

    def cost(self, places: Indices) -> float:
        """What is run on average of inputs that leave at these ramps, as a share of the whole network."""
        return float(self.costs[places].mean())

    def answers(self, places: Indices) -> Labels:
        """What inputs are answered that leave at these ramps."""
        labels: Labels = self.labels[places, np.arange(self.num_inputs)]
        return labels

    def losses(self, metric: Metric) -> Floats:
        """Ramps + 1 x inputs: 1 where the full network's answer is right and this one wrong, -1 the other way about.

        Agreement cannot be won: any other answer than the full network's is a loss. Where classes count alike, however
        rare they are, so do their losses here.
        """
        judged = (self.agrees if metric == "agreement" else self.right).astype(np.float64)
        lost: Floats = (1.0 if metric == "agreement" else self.full_right) - judged
        return lost if metric in OF_ALL else lost * balancing(self.truth)

    def lost(self, places: Indices, metric: Metric) -> tuple[Loss, ...]:
        """What inputs lose that leave at these ramps: each of these losses must be within what is allowed."""
        if metric in SCORES:
            return (score_loss(metric, self.truth, self.full_labels, self.answers(places)),)
        everyone = np.arange(self.num_inputs)
        if metric == "agreement":
            same = self.answers(places) == self.full_labels if self.agreed is None else self.agreed[places, everyone]
            return (mean_loss(1.0 - same.astype(np.float64)),)
        lost = self.full_right - self.right[places, everyone]
        return losses_by_class(lost, self.truth) if metric == "worst-class" else (mean_loss(lost),)


@dataclass(frozen=True)
class Leaving:
    """One choice of thresholds on one table. `places` is the ramp where an input leaves (their number: at the end)."""

    places: Indices
    cost: float
    losses: tuple[Loss, ...]

    @property
    def lost(self) -> Loss:
        """The greatest loss."""
        return max(self.losses, key=lambda each: float(each.mean))


def outcome(table: ExitTable, chosen: Indices, metric: Metric) -> Leaving:
    """What happens with this candidate at each ramp."""
    places = table.places(chosen)
    return Leaving(places, table.cost(places), table.lost(places, metric))


def ladder(table: ExitTable, metric: Metric, multipliers: Floats = MULTIPLIERS) -> list[Indices]:
    """Choices of thresholds, from the one that loses least to the one that costs least.

    Between two that multipliers find lie those that lead from one to the other.
    """
    losses = table.losses(metric)
    rungs, chosen, least = [table.strictest], table.strictest, table.costs[-1]
    for multiplier in multipliers:
        values = table.costs[:, None] + multiplier * losses
        chosen = improved(table, chosen, values)
        if (cost := table.cost(table.places(chosen))) < least - ROUNDING:
            least = cost
            rungs += _between(table, values, rungs[-1], chosen)
    return rungs


def _between(table: ExitTable, values: Floats, low: Indices, high: Indices) -> Iterator[Indices]:
    """From one choice to another, a candidate at one ramp at a time: always the one after which the mean is least."""
    while (ahead := np.sign(high - low)).any():
        growths = np.where(ahead != 0, _growths(table, values, low, ahead), np.inf)
        low = np.where(np.arange(len(low)) == growths.argmin(), low + ahead, low)
        yield low


def _growths(table: ExitTable, values: Floats, chosen: Indices, ahead: Indices) -> Floats:
    """By how much the sum of the values grows with the next candidate (1 ahead) or the one before (-1) at each ramp."""
    left = np.logical_or.accumulate(table.first <= chosen[:, None], axis=0)
    later, growths = values[-1], np.zeros(len(chosen))
    for ramp in reversed(range(len(chosen))):
        moved = table.first[ramp] == (chosen[ramp] + 1 if ahead[ramp] > 0 else chosen[ramp])
        if ramp:
            moved &= ~left[ramp - 1]
        growths[ramp] = ahead[ramp] * (values[ramp] - later)[moved].sum()
        later = np.where(table.first[ramp] <= chosen[ramp], values[ramp], later)
    return growths


def highest(rungs: Sequence[Indices], table: ExitTable, metric: Metric, shown: Callable[[Loss], bool]) -> Indices:
    """The last rung before the first whose losses are not all shown to be small enough; the first if there is none."""
    kept = rungs[0]
    for chosen in rungs[1:]:
        if not all(map(shown, outcome(table, chosen, metric).losses)):
            break
        kept = chosen
    return kept


def improved(table: ExitTable, chosen: Indices, values: Floats) -> Indices:
    """Improve one ramp at a time, from the last to the first, until a pass changes nothing."""
    for _ in range(MAX_PASSES):
        before, chosen = chosen, _pass(table, chosen, values)
        if np.array_equal(before, chosen):
            break
    return chosen


def _pass(table: ExitTable, chosen: Indices, values: Floats) -> Indices:
    """The best candidate for each ramp, while those before it stay as they are and those after it are the new ones."""
    left = np.logical_or.accumulate(table.first <= chosen[:, None], axis=0)
    later, best = values[-1], chosen.copy()
    for ramp in reversed(range(table.num_ramps)):
        gains = values[ramp] - later
        if ramp:
            gains = np.where(left[ramp - 1], 0.0, gains)
        sums = np.bincount(table.first[ramp], gains, len(table.candidates) + 1).cumsum()[:-1]
        best[ramp] = sums.argmin()
        later = np.where(table.first[ramp] <= best[ramp], values[ramp], later)
    return best
