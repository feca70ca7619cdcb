"""Asks the policy which inputs leave, for every ramp, candidate threshold and input, and makes an `ExitTable`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import expit
from torch import Tensor

from isobatch.deployments import exits
from isobatch.deployments.exits import Decision, Policy, Range, memory_width, name_of, range_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.exit_table import ExitTable

# The candidates, as shares of a policy's range: they are finer towards both ends.
SHARES = expit(np.linspace(-9.0, 9.0, 73))
DECIMALS = 6  # decimals of a threshold, at least
BEYOND = 1e-3  # the distance of the threshold that no value reaches from the highest value, as a share of the range
# The assumed range of a policy that declares none: a policy with memory counts ramps, any other compares a share.
COUNTS = Range(low=lambda labels: 1.0, high=lambda ramps: float(ramps), whole=True)
SHARES_OF_ONE = Range(low=lambda labels: 0.0, high=lambda ramps: 1.0)
# Policies that also take a column of thresholds, and give a row of `leaves` for each: what they compare with thresholds
# is computed once. One call for each of many thresholds takes 20 times as long.
AT_ONCE = (
    exits.confidence, exits.entropy, exits.margin, exits.five_best, exits.patience, exits.voting, exits.near,
    exits.near_number,
)  # fmt: skip


def candidates(policy: Policy, num_labels: int, num_ramps: int) -> NDArray[np.float64]:
    """The thresholds worth trying, the strictest first: from one that never fires to one that always does.

    >>> candidates(exits.patience, num_labels=2, num_ramps=3).tolist()
    [4.0, 3.0, 2.0, 1.0]
    """
    values = range_of(policy) or (COUNTS if memory_width(policy, num_labels) else SHARES_OF_ONE)
    low, high = values.low(num_labels), values.high(num_ramps)
    if values.whole:
        thresholds = np.arange(low, high + 2.0)
    else:
        span = high - low
        decimals = max(DECIMALS, DECIMALS - 1 - math.floor(math.log10(span)))
        thresholds = np.array([low, *(low + span * SHARES).round(decimals), high + max(1.0, span) * BEYOND])
    return thresholds if values.leaves_below else thresholds[::-1]


@torch.inference_mode()
def replay(
    policy: Policy,
    logits: Tensor,
    head: Tensor,
    targets: Tensor,
    costs: Sequence[float],
    only: float | None = None,
    reference: Tensor | None = None,
) -> ExitTable:
    """The exit table of a policy, for every ramp (logits: ramps x inputs x labels, calibrated) and every candidate.

    `only`: a single threshold in place of the candidates. `reference`: the logits of another network, against which
    losses are counted.
    """
    num_ramps, count, num_labels = logits.shape
    thresholds = candidates(policy, num_labels, num_ramps) if only is None else np.array([only])
    leaves = np.zeros((num_ramps, len(thresholds), count), np.bool_)
    answers = [head] * (num_ramps + 1)
    memory = torch.zeros(count, memory_width(policy, num_labels))
    for ramp in range(num_ramps):
        decided = _decided(policy, logits[ramp], thresholds, memory)
        leaves[ramp], answers[ramp], memory = decided.leaves.numpy(), decided.answer, decided.memory
    labels = torch.stack([answer.argmax(dim=1) for answer in answers])
    right = targets.gather(1, labels.T).T
    if leaves[:, 0].sum() > leaves[:, -1].sum():  # the policy declares no range, and inputs leave below the threshold
        thresholds, leaves = thresholds[::-1], leaves[:, ::-1]
    if (leaves[:, :-1] & ~leaves[:, 1:]).any():
        raise UserError(
            f"policy {name_of(policy)}: an input that leaves at a threshold must leave at all less strict ones"
        )
    first = (~leaves).sum(axis=1, dtype=np.uint8)
    answered, truth = labels.numpy().astype(np.uint16), targets.argmax(dim=1).numpy()
    full = None if reference is None else reference.argmax(dim=1).numpy().astype(np.uint16)
    return ExitTable(thresholds, first, right.numpy(), answered, truth, np.array([*costs, 1.0]), full)


def _decided(policy: Policy, logits: Tensor, thresholds: NDArray[np.float64], memory: Tensor) -> Decision:
    """The decision at one ramp, with a row of `leaves` for each threshold."""
    if policy in AT_ONCE:
        column = torch.from_numpy(thresholds.astype(np.float32)).to(logits.dtype)[:, None]
        return cast(Callable[[Tensor, Tensor, Tensor], Decision], policy)(logits, column, memory)
    decisions = [policy(logits, float(threshold), memory) for threshold in thresholds]
    if any(not torch.equal(decisions[0].memory, each.memory) for each in decisions[1:]):
        raise UserError(
            f"policy {name_of(policy)}: its memory depends on the threshold, so thresholds cannot be searched"
        )
    return replace(decisions[0], leaves=torch.stack([decision.leaves for decision in decisions]))


# Bounds of the search for a temperature. Ramps beyond them are useless: sure of everything, or of nothing.
MIN_TEMPERATURE = 0.05
MAX_TEMPERATURE = 20.0


def temperature(logits: Tensor, targets: Tensor) -> float:
    """The divisor of the logits under which the targets (probabilities) are most likely.

    The loss is convex in the inverse of the temperature, so there is one minimum to find.

    >>> sure_but_half_wrong = torch.tensor([[9.0, 0.0], [9.0, 0.0]])
    >>> round(temperature(sure_but_half_wrong, torch.eye(2)), 2)
    20.0
    """

    def loss(log_temperature: float) -> float:
        return torch.nn.functional.cross_entropy(logits / math.exp(log_temperature), targets).item()

    bounds = (math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE))
    result = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return round(math.exp(result.x), 4)


BINS = 15  # of confidence, over which the calibration error is summed


def calibration_error(logits: Tensor, targets: Tensor) -> float:
    """Expected calibration error: the mean difference of confidence and accuracy, over equally wide confidence bins.

    >>> round(calibration_error(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.eye(2)), 3)
    0.0
    """
    confidence, label = logits.softmax(dim=1).max(dim=1)
    right = targets.gather(1, label.unsqueeze(1)).squeeze(1)
    places = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS).index_add(0, places, right - confidence)
    return float(gaps.abs().sum() / len(logits))
