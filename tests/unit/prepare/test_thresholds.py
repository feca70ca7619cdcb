"""The table of who would leave: what must hold for every policy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments import exits
from isobatch.deployments.exits import Decision, memory_width
from isobatch.deployments.prepare.thresholds import AT_ONCE, candidates, replay
from isobatch.profiles.errors import UserError
from isobatch.profiles.exit_table import ExitTable, outcome

POLICIES = [exits.entropy, exits.confidence, exits.margin, exits.patience, exits.voting]


def recorded(seed: int, ramps: int = 3, count: int = 80, labels: int = 3) -> tuple[torch.Tensor, ...]:
    """Ramps that know more the deeper they are, and the full network after them."""
    random = torch.Generator().manual_seed(seed)
    truth = torch.eye(labels)[torch.randint(labels, (count,), generator=random)]
    hardness = torch.rand(count, 1, generator=random) * 3
    depth = torch.arange(1, ramps + 2).view(-1, 1, 1)
    logits = depth * truth * 2 + hardness * torch.randn(ramps + 1, count, labels, generator=random)
    return logits[:-1], logits[-1], truth


def tabled(policy: exits.Policy, seed: int, ramps: int = 3) -> ExitTable:
    logits, head, truth = recorded(seed, ramps)
    return replay(policy, logits, head, truth, [(ramp + 1) / (ramps + 1) for ramp in range(ramps)])


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
    np.testing.assert_array_equal(outcome(table, chosen, "accuracy").places, places)


@pytest.mark.parametrize("policy", AT_ONCE)
@settings(max_examples=20)
@given(seed=st.integers(0, 999), ramps=st.integers(1, 5), labels=st.integers(2, 6))
def test_all_thresholds_at_once_are_what_one_after_the_other_is(
    policy: exits.Policy, seed: int, ramps: int, labels: int
) -> None:
    logits, head, truth = recorded(seed, ramps, labels=labels)
    logits[:, :20] = logits[:, :20].round()  # values that are as large as each other, and as large as thresholds
    costs = [(ramp + 1) / (ramps + 1) for ramp in range(ramps)]
    table, memory = replay(policy, logits, head, truth, costs), torch.zeros(len(truth), memory_width(policy, labels))
    for ramp in range(ramps):
        decisions = [policy(logits[ramp], float(threshold), memory) for threshold in table.candidates]
        for candidate, decision in enumerate(decisions):
            np.testing.assert_array_equal(table.first[ramp] <= candidate, decision.leaves.numpy())
        np.testing.assert_array_equal(table.labels[ramp], decisions[0].answer.argmax(dim=1))
        memory = decisions[0].memory


@settings(max_examples=30)
@given(policy=st.sampled_from(POLICIES), ramps=st.integers(1, 12), labels=st.integers(2, 20))
def test_candidates_always_fire_or_never_at_the_ends(policy: exits.Policy, ramps: int, labels: int) -> None:
    reached = {exits.reach(policy, float(value), labels, ramps) for value in candidates(policy, labels, ramps)}
    assert {"always", "never"} <= reached
    assert exits.reach(policy, float(candidates(policy, labels, ramps)[0]), labels, ramps) == "never"


def test_agreement_is_with_the_full_networks_answer() -> None:
    logits, head, truth = recorded(4)
    table = tabled(exits.confidence, 4)
    np.testing.assert_array_equal(table.agrees[:-1], (logits.argmax(2) == head.argmax(1)).numpy())
    assert table.agrees[-1].all()
    np.testing.assert_array_equal(table.right[-1], (head.argmax(1) == truth.argmax(1)).numpy())


def test_a_policy_that_declares_no_range_may_leave_below_its_threshold() -> None:
    def unsure(logits: torch.Tensor, threshold: float, memory: torch.Tensor) -> Decision:
        return Decision(logits.softmax(dim=1).amin(dim=1) < threshold, logits, memory)

    table = tabled(unsure, 0)
    assert outcome(table, table.strictest, "accuracy").cost == 1.0


def test_a_policy_that_is_not_monotone_is_refused() -> None:
    def between(logits: torch.Tensor, threshold: float, memory: torch.Tensor) -> Decision:
        return Decision((logits.softmax(dim=1).amax(dim=1) - threshold).abs() < 0.1, logits, memory)

    with pytest.raises(UserError, match="policy between: an input that leaves at a threshold"):
        tabled(between, 0)


def test_a_policy_whose_memory_depends_on_its_threshold_is_refused() -> None:
    @exits.remembers(lambda labels: 1)
    def odd(logits: torch.Tensor, threshold: float, memory: torch.Tensor) -> Decision:
        return Decision(logits[:, 0] > threshold, logits, memory + threshold)

    logits, head, truth = recorded(0)
    with pytest.raises(UserError, match="policy odd: its memory depends on the threshold"):
        replay(odd, logits, head, truth, [0.25, 0.5, 0.75])
