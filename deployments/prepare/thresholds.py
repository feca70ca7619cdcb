"""Choose a threshold for every ramp: the least depth for the accuracy that may be lost.

The policy itself is asked who would leave, for every ramp, candidate threshold and input (a table of booleans). An
input leaves at the first ramp that lets it go: the depth and the loss of any set of thresholds are sums over the table.

    cost(input) = depth where it leaves + multiplier * accuracy lost there

For a multiplier (what accuracy is worth), thresholds are improved one ramp at a time until no change helps. A ladder of
multipliers, started from the best single threshold for all ramps, gives the curve from "as early as possible" to "never
wrong". The least depth on it whose loss is allowed wins, and spends what is left of the allowance one ramp at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from deployments.exits import Policy, Range, memory_width, range_of
from profiles.errors import UserError

MULTIPLIERS = np.geomspace(0.5, 5000.0, 41)
# Half of what lies between chance and certainty, and ever finer towards both ends.
SHARES = expit(np.linspace(-9.0, 9.0, 73))
DECIMALS = 6
BEYOND = 1e-3  # so far above the highest value, in shares of the range, lies the threshold that no value reaches
# What is assumed of a policy that declares no range: one that remembers counts ramps, any other compares a share.
COUNTS = Range(low=lambda labels: 1.0, high=lambda ramps: float(ramps), whole=True)
SHARES_OF_ONE = Range(low=lambda labels: 0.0, high=lambda ramps: 1.0)
MAX_PASSES = 20
ROUNDING = 1e-9


@dataclass(frozen=True)
class Replay:
    """What a policy would do with recorded logits: for every ramp and candidate threshold, who leaves, and how right.

    `leaves` is ramps x candidates x inputs; `right` is ramps + 1 x inputs, the full network last: 1 for a right answer.
    `depths` is the share of the network that has run at each ramp, and 1.0 at the end.
    """

    candidates: NDArray[np.float64]
    leaves: NDArray[np.bool_]
    right: NDArray[np.float64]
    depths: NDArray[np.float64]


@dataclass(frozen=True)
class Tradeoff:
    """One set of thresholds on one set of inputs. `places` is the ramp where each leaves (their number: at the end)."""

    places: NDArray[np.int64]
    depth: float
    lost: float
    lost_deviation: float


def candidates(policy: Policy, num_labels: int, num_ramps: int) -> NDArray[np.float64]:
    """The thresholds worth trying, one that never fires and one that always does among them.

    >>> from deployments.exits import patience
    >>> candidates(patience, num_labels=2, num_ramps=3).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    values = range_of(policy) or (COUNTS if memory_width(policy, num_labels) else SHARES_OF_ONE)
    low, high = values.low(num_labels), values.high(num_ramps)
    if values.whole:
        return np.arange(low, high + 2.0)
    span = high - low
    decimals = max(DECIMALS, DECIMALS - 1 - math.floor(math.log10(span)))
    return np.array([low, *(low + span * SHARES).round(decimals), high + max(1.0, span) * BEYOND])


@torch.inference_mode()
def replay(
    policy: Policy, logits: Tensor, head: Tensor, targets: Tensor, depths: Sequence[float], only: float | None = None
) -> Replay:
    """Ask the policy about every ramp (logits: ramps x inputs x labels, calibrated) and every candidate.

    `only`: the one threshold to be asked about, instead of those worth trying.
    """
    num_ramps, count, num_labels = logits.shape
    tried = candidates(policy, num_labels, num_ramps) if only is None else np.array([only])
    leaves = np.zeros((num_ramps, len(tried), count), np.bool_)
    right = np.zeros((num_ramps + 1, count))
    memory = torch.zeros(count, memory_width(policy, num_labels))
    for ramp in range(num_ramps):
        decisions = [policy(logits[ramp], float(threshold), memory) for threshold in tried]
        _check_independent(policy, [decision.memory for decision in decisions])
        leaves[ramp] = torch.stack([decision.leaves for decision in decisions]).numpy()
        right[ramp] = _rightness(decisions[0].answer, targets)
        memory = decisions[0].memory
    right[num_ramps] = _rightness(head, targets)
    return Replay(tried, leaves, right, np.array([*depths, 1.0]))


def _rightness(answer: Tensor, targets: Tensor) -> NDArray[np.float64]:
    chosen: NDArray[np.float64] = targets.gather(1, answer.argmax(dim=1, keepdim=True)).squeeze(1).double().numpy()
    return chosen


def _check_independent(policy: Policy, memories: Sequence[Tensor]) -> None:
    if any(not torch.equal(memories[0], memory) for memory in memories[1:]):
        name = getattr(policy, "__name__", str(policy))
        raise UserError(f"policy {name}: what it remembers depends on its threshold, so thresholds cannot be searched")


def tradeoff(table: Replay, chosen: NDArray[np.int64]) -> Tradeoff:
    """What happens with this candidate at each ramp."""
    num_ramps = len(chosen)
    leaving = table.leaves[np.arange(num_ramps), chosen]
    places = np.where(leaving.any(axis=0), leaving.argmax(axis=0), num_ramps)
    loss = table.right[-1] - table.right[places, np.arange(len(places))]
    deviation = float(_deviation(loss.mean(), (loss**2).mean(), len(loss)))
    return Tradeoff(places, float(table.depths[places].mean()), float(loss.mean()), deviation)


def _deviation(mean: Any, mean_square: Any, count: int) -> Any:
    """The standard error of a mean. One loss more than was seen is assumed: none in 50 inputs is no proof of none."""
    return np.sqrt((np.maximum(mean_square - mean**2, 0.0) + 1 / count) / count)


def search(table: Replay, max_loss: float, margin: float) -> NDArray[np.int64]:
    """The candidate of each ramp that gives the least depth.

    The loss seen on these inputs, plus `margin` standard errors of it, must stay within `max_loss`: the least of many
    noisy figures is too good to be true, and other inputs will be served than these.
    """

    def judge(chosen: NDArray[np.int64]) -> tuple[bool, float]:
        """Allowed before not allowed, then by depth."""
        result = tradeoff(table, chosen)
        allowed = result.lost + margin * result.lost_deviation <= max_loss + ROUNDING
        return not allowed, result.depth if allowed else result.lost

    shared = [np.full(len(table.leaves), candidate) for candidate in range(len(table.candidates))]
    found = [_never(table), min(shared, key=judge)]
    for multiplier in MULTIPLIERS:
        found.append(_descend(table, found[-1], float(multiplier)))
    return _refine(table, min(found, key=judge), max_loss, margin)


def _never(table: Replay) -> NDArray[np.int64]:
    return np.asarray(table.leaves.sum(axis=2).argmin(axis=1))


def _descend(table: Replay, chosen: NDArray[np.int64], multiplier: float) -> NDArray[np.int64]:
    """Cheaper one ramp at a time, from the last to the first, until a pass changes nothing."""
    cost = table.depths[:, None] + multiplier * (table.right[-1] - table.right)
    for _ in range(MAX_PASSES):
        before = chosen
        for ramp in reversed(range(len(chosen))):
            chosen = _with(chosen, ramp, int(_means(table, chosen, ramp, cost).argmin()))
        if np.array_equal(before, chosen):
            break
    return chosen


def _refine(table: Replay, chosen: NDArray[np.int64], max_loss: float, margin: float) -> NDArray[np.int64]:
    """Spend what the ladder left of the allowance: the one change that saves most depth, until none is allowed."""
    depth = np.broadcast_to(table.depths[:, None], table.right.shape)
    loss = table.right[-1] - table.right
    best = tradeoff(table, chosen).depth
    while True:
        moves = []
        for ramp in range(len(chosen)):
            lost, squared = _means(table, chosen, ramp, loss), _means(table, chosen, ramp, loss**2)
            deviation = _deviation(lost, squared, loss.shape[1])
            depths = np.where(
                lost + margin * deviation <= max_loss + ROUNDING, _means(table, chosen, ramp, depth), np.inf
            )
            moves.append((float(depths.min()), ramp, int(depths.argmin())))
        least, ramp, candidate = min(moves)
        if least >= best - ROUNDING:
            return chosen
        best, chosen = least, _with(chosen, ramp, candidate)


def _with(chosen: NDArray[np.int64], ramp: int, candidate: int) -> NDArray[np.int64]:
    changed = chosen.copy()
    changed[ramp] = candidate
    return changed


def _means(table: Replay, chosen: NDArray[np.int64], ramp: int, values: NDArray[Any]) -> NDArray[np.float64]:
    """The mean of a value (ramps + 1 x inputs, taken where an input leaves) for each candidate at this ramp.

    Inputs that reach the ramp leave there, or wherever they would without it.
    """
    num_ramps, everyone = len(chosen), np.arange(values.shape[1])
    leaving = table.leaves[np.arange(num_ramps), chosen]
    leaving[ramp] = False
    reaches = ~leaving[:ramp].any(axis=0)
    without = values[np.where(leaving.any(axis=0), leaving.argmax(axis=0), num_ramps), everyone]
    gain = np.where(reaches, values[ramp] - without, 0.0)
    means: NDArray[np.float64] = (without.sum() + table.leaves[ramp] @ gain) / len(everyone)
    return means
