"""A policy of one's own takes one file: a function, and what it declares of itself."""

import numpy as np
import torch
from torch import Tensor

from isobatch.deployments.exits import Decision, Range, reach, remembers, takes
from isobatch.deployments.prepare.thresholds import candidates, replay
from isobatch.profiles.exit_table import ladder, outcome

LOW, HIGH = 100.0, 300.0


@takes(Range(low=lambda labels: LOW, high=lambda ramps: HIGH))
@remembers(lambda num_labels: 1)
def trend(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave when this ramp and the best one before are surer than the threshold, on a scale from 100 to 300."""
    sure = LOW + (HIGH - LOW) * logits.softmax(dim=1).amax(dim=1, keepdim=True)
    best = torch.maximum(sure, memory)
    return Decision(((sure + best) / 2).squeeze(1) >= threshold, logits, best)


def recorded(ramps: int, count: int = 300, labels: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    truth = torch.eye(labels)[torch.randint(labels, (count,), generator=random)]
    logits = truth * 3 + torch.randn(ramps + 1, count, labels, generator=random)
    return logits[:-1], logits[-1], truth


def test_its_thresholds_are_searched_in_the_range_that_it_declares() -> None:
    tried = candidates(trend, num_labels=3, num_ramps=2)
    assert len(tried) > 50
    assert {reach(trend, float(value), 3, 2) for value in tried} == {"always", "sometimes", "never"}
    assert np.median(tried) == (LOW + HIGH) / 2
    table = replay(trend, *recorded(ramps=2), costs=[1 / 3, 2 / 3])
    result = [outcome(table, chosen, "accuracy") for chosen in ladder(table, "accuracy")]
    assert result[0].cost == 1.0
    assert min(each.cost for each in result if each.lost.mean <= 0.03) < 0.9
