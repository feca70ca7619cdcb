"""Ask the policy itself who would leave: for every ramp, candidate threshold and recorded input, as an `ExitTable`."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from deployments.exits import Policy, Range, memory_width, range_of
from profiles.errors import UserError
from profiles.exit_table import ExitTable

# Half of what lies between chance and certainty, and ever finer towards both ends.
SHARES = expit(np.linspace(-9.0, 9.0, 73))
DECIMALS = 6
BEYOND = 1e-3  # so far above the highest value, in shares of the range, lies the threshold that no value reaches
# What is assumed of a policy that declares no range: one that remembers counts ramps, any other compares a share.
COUNTS = Range(low=lambda labels: 1.0, high=lambda ramps: float(ramps), whole=True)
SHARES_OF_ONE = Range(low=lambda labels: 0.0, high=lambda ramps: 1.0)


def candidates(policy: Policy, num_labels: int, num_ramps: int) -> NDArray[np.float64]:
    """The thresholds worth trying, the strictest first: from one that never fires to one that always does.

    >>> from deployments.exits import patience
    >>> candidates(patience, num_labels=2, num_ramps=3).tolist()
    [4.0, 3.0, 2.0, 1.0]
    """
    values = range_of(policy) or (COUNTS if memory_width(policy, num_labels) else SHARES_OF_ONE)
    low, high = values.low(num_labels), values.high(num_ramps)
    if values.whole:
        tried = np.arange(low, high + 2.0)
    else:
        span = high - low
        decimals = max(DECIMALS, DECIMALS - 1 - math.floor(math.log10(span)))
        tried = np.array([low, *(low + span * SHARES).round(decimals), high + max(1.0, span) * BEYOND])
    return tried if values.leaves_below else tried[::-1]


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
    """Ask the policy about every ramp (logits: ramps x inputs x labels, calibrated) and every candidate.

    `only`: the one threshold to be asked about, instead of those worth trying. `reference`: the logits of another
    network, which nothing may be lost against.
    """
    num_ramps, count, num_labels = logits.shape
    tried = candidates(policy, num_labels, num_ramps) if only is None else np.array([only])
    leaves = np.zeros((num_ramps, len(tried), count), np.bool_)
    answers = [head] * (num_ramps + 1)
    memory = torch.zeros(count, memory_width(policy, num_labels))
    for ramp in range(num_ramps):
        decisions = [policy(logits[ramp], float(threshold), memory) for threshold in tried]
        _check_independent(policy, [decision.memory for decision in decisions])
        leaves[ramp] = torch.stack([decision.leaves for decision in decisions]).numpy()
        answers[ramp], memory = decisions[0].answer, decisions[0].memory
    labels = torch.stack([answer.argmax(dim=1) for answer in answers])
    right = targets.gather(1, labels.T).T
    if leaves[:, 0].sum() > leaves[:, -1].sum():  # the policy declares no range, and leaves below
        tried, leaves = tried[::-1], leaves[:, ::-1]
    _check_monotone(policy, leaves)
    first = (~leaves).sum(axis=1, dtype=np.uint8)
    said, truth = labels.numpy().astype(np.uint16), targets.argmax(dim=1).numpy()
    full = None if reference is None else reference.argmax(dim=1).numpy().astype(np.uint16)
    return ExitTable(tried, first, right.numpy(), said, truth, np.array([*costs, 1.0]), full)


def _check_independent(policy: Policy, memories: Sequence[Tensor]) -> None:
    if any(not torch.equal(memories[0], memory) for memory in memories[1:]):
        raise UserError(
            f"policy {_name(policy)}: what it remembers depends on its threshold, so thresholds cannot be searched"
        )


def _check_monotone(policy: Policy, leaves: NDArray[np.bool_]) -> None:
    """Who leaves at a threshold must leave at every less strict one, too."""
    if (leaves[:, :-1] & ~leaves[:, 1:]).any():
        raise UserError(f"policy {_name(policy)}: who leaves must be more and more as thresholds go one way")


def _name(policy: Policy) -> str:
    return getattr(policy, "__name__", str(policy))
