"""Thresholds: against brute force, and what must hold for every policy."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments import exits
from deployments.exits import Decision
from deployments.prepare.thresholds import Replay, candidates, replay, search, tradeoff
from profiles.errors import UserError

POLICIES = [exits.entropy, exits.confidence, exits.margin, exits.patience, exits.voting]


def recorded(seed: int, ramps: int = 3, count: int = 80, labels: int = 3) -> tuple[torch.Tensor, ...]:
    """Ramps that know more the deeper they are, and the full network after them."""
    random = torch.Generator().manual_seed(seed)
    truth = torch.eye(labels)[torch.randint(labels, (count,), generator=random)]
    hardness = torch.rand(count, 1, generator=random) * 3
    depth = torch.arange(1, ramps + 2).view(-1, 1, 1)
    logits = depth * truth * 2 + hardness * torch.randn(ramps + 1, count, labels, generator=random)
    return logits[:-1], logits[-1], truth


def tabled(policy: exits.Policy, seed: int, ramps: int = 3) -> Replay:
    logits, head, truth = recorded(seed, ramps)
    return replay(policy, logits, head, truth, [(ramp + 1) / (ramps + 1) for ramp in range(ramps)])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_loss", [0.0, 0.05])
def test_search_keeps_to_the_allowed_loss_and_beats_every_single_threshold(
    policy: exits.Policy, max_loss: float
) -> None:
    for seed in range(5):
        table = tabled(policy, seed)
        result = tradeoff(table, search(table, max_loss, margin=0.0))
        shared = [tradeoff(table, np.full(3, index)) for index in range(len(table.candidates))]
        assert result.lost <= max_loss
        assert result.depth <= min(one.depth for one in shared if one.lost <= max_loss) + 1e-12


def thinned(table: Replay, kept: int) -> Replay:
    chosen = np.linspace(0, len(table.candidates) - 1, kept).astype(int)
    return Replay(table.candidates[chosen], table.leaves[:, chosen], table.right, table.depths)


def test_search_comes_close_to_brute_force() -> None:
    gaps = []
    for seed in range(20):
        table = thinned(tabled(exits.confidence, seed), 9)
        every = [tradeoff(table, np.array(chosen)) for chosen in product(range(9), repeat=3)]
        best = min(one.depth for one in every if one.lost <= 0.03)
        gaps.append(tradeoff(table, search(table, 0.03, margin=0.0)).depth - best)
    assert min(gaps) >= -1e-12
    assert float(np.mean(gaps)) < 0.01
    assert max(gaps) < 0.05


def test_a_margin_never_makes_inputs_leave_earlier() -> None:
    for seed in range(10):
        table = tabled(exits.entropy, seed)
        depths = [tradeoff(table, search(table, 0.05, margin)).depth for margin in (0.0, 1.0, 2.0)]
        assert depths == sorted(depths)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_table_says_what_the_policy_does_step_by_step(policy: exits.Policy) -> None:
    logits, _, truth = recorded(1)
    table = tabled(policy, 1)
    chosen = np.array([index % len(table.candidates) for index in (40, 30, 20)])
    memory = torch.zeros(len(truth), exits.memory_width(policy, 3))
    inside, places = np.ones(len(truth), bool), np.full(len(truth), 3)
    for ramp, candidate in enumerate(chosen):
        decision = policy(logits[ramp], float(table.candidates[candidate]), memory)
        leaving = decision.leaves.numpy() & inside
        places[leaving], inside = ramp, inside & ~leaving
        memory = decision.memory
    np.testing.assert_array_equal(tradeoff(table, chosen).places, places)


@settings(max_examples=30, deadline=None)
@given(policy=st.sampled_from(POLICIES), ramps=st.integers(1, 12), labels=st.integers(2, 20))
def test_candidates_hold_one_that_always_and_one_that_never_fires(
    policy: exits.Policy, ramps: int, labels: int
) -> None:
    reached = {exits.reach(policy, float(value), labels, ramps) for value in candidates(policy, labels, ramps)}
    assert {"always", "never"} <= reached


def test_a_policy_whose_memory_depends_on_its_threshold_is_refused() -> None:
    @exits.remembers(lambda labels: 1)
    def odd(logits: torch.Tensor, threshold: float, memory: torch.Tensor) -> Decision:
        return Decision(logits[:, 0] > threshold, logits, memory + threshold)

    logits, head, truth = recorded(0)
    with pytest.raises(UserError, match="policy odd: what it remembers depends on its threshold"):
        replay(odd, logits, head, truth, [0.25, 0.5, 0.75])
