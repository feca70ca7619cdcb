"""A policy of one's own takes one file: a function, and what it declares of itself."""

import numpy as np
import torch
from torch import Tensor

from isobatch.deployments.exits import Decision, Range, memory_width, reach, remembers, takes
from isobatch.deployments.models.ramps import Ramps, policy_at
from isobatch.deployments.prepare.thresholds import candidates, replay
from isobatch.profiles.exit_table import ladder, outcome
from tests.helpers.tiny_networks import network, random_inputs, with_memory

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
    found = [outcome(table, chosen, "accuracy") for chosen in ladder(table, "accuracy")]
    assert found[0].cost == 1.0
    assert min(each.cost for each in found if each.lost.mean <= 0.03) < 0.9


def test_it_is_named_by_its_import_path_and_runs_in_a_network() -> None:
    assert policy_at(f"{__name__}:trend") is trend
    assert memory_width(trend, 3) == 1
    toy = network("vit", "entropy", [0.5]).ramps
    rules = toy.rules.model_copy(update={"policy": f"{__name__}:trend"})
    ramps = [rule.model_copy(update={"threshold": 270.0}) for rule in rules.ramps]
    model = network("vit").with_ramps(Ramps(rules.model_copy(update={"ramps": tuple(ramps)}), toy.heads))
    batch = model.merge([with_memory(one, model) for one in random_inputs("vit", 20, seed=1)])
    whole = model.run(batch, model.num_blocks, model.ramp_blocks).exits
    first = model.run(batch, 2, model.ramp_blocks)
    rest = model.run(first.survivors, model.num_blocks, model.ramp_blocks).exits
    early = {int(row): int(block) for row, block in zip(first.exits.rows, first.exits.blocks, strict=True)}
    late = np.setdiff1d(np.arange(20), first.exits.rows)[rest.rows]
    together = early | {int(row): int(block) for row, block in zip(late, rest.blocks, strict=True)}
    assert together == {int(row): int(block) for row, block in zip(whole.rows, whole.blocks, strict=True)}
    assert len(set(together.values())) > 1
