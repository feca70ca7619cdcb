"""Policies decide input by input, as their definitions say, and what they remember is enough."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments import exits
from isobatch.deployments.exits import Policy, memory_width, reach

ALL: dict[str, Policy] = {
    name: getattr(exits, name) for name in ("entropy", "confidence", "margin", "patience", "voting")
}

logits_of_ramps = st.lists(
    st.lists(st.floats(-6, 6, width=32), min_size=3, max_size=3), min_size=1, max_size=8
)  # one input's logits at each ramp


def walk(policy: Policy, ramps: list[list[float]], threshold: float) -> int | None:
    """The ramp at which a lone input leaves."""
    memory = torch.zeros(1, memory_width(policy, 3))
    for ramp, logits in enumerate(ramps):
        decision = policy(torch.tensor([logits]), threshold, memory)
        if decision.leaves.item():
            return ramp
        memory = decision.memory
    return None


@given(logits_of_ramps, st.floats(0, 1))
def test_independent_policies_are_their_definitions(ramps: list[list[float]], threshold: float) -> None:
    for logits in ramps:
        p = np.sort(np.exp(logits) / np.exp(logits).sum())
        values = {"entropy": -(p * np.log(p)).sum() / math.log(3), "confidence": p[-1], "margin": p[-1] - p[-2]}
        for name, value in values.items():
            leaves = value < threshold if name == "entropy" else value >= threshold
            if abs(value - threshold) > 1e-5:
                assert (walk(ALL[name], [logits], threshold) == 0) == leaves


@given(st.floats(-9, 9, width=32), st.floats(-9, 3, width=32), st.floats(0, 1))
def test_a_score_leaves_where_it_will_hardly_move(logit: float, distance: float, threshold: float) -> None:
    score = 1 / (1 + math.exp(-logit))
    for policy, unit in ((exits.near, score * (1 - score) + exits.SCORE_STEP), (exits.near_number, 1.0)):
        decision = policy(torch.tensor([[logit, distance]]), threshold, torch.zeros(1, memory_width(policy, 1)))
        moves = min(1.0, math.exp(distance) * unit)
        if abs(moves - threshold) > 1e-5:
            assert decision.leaves.item() == (moves < threshold)
        assert decision.answer.tolist() == [[logit]]
        assert reach(policy, 1.001, 2, 3) == "always"
        assert reach(policy, 0.0, 2, 3) == "never"


numbers_of_a_ramp = st.tuples(st.floats(-4, 4, width=32), st.floats(-6, 2, width=32))
contestants = st.lists(st.tuples(st.integers(0, 2), st.lists(numbers_of_a_ramp, min_size=2, max_size=2)), max_size=9)


@given(contestants, st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_a_score_leaves_that_cannot_be_among_the_best_of_its_request(found: list[Any], wanted: list[int]) -> None:
    """At each of two ramps: so many others of its request are known to end above it, here or at the ramp before."""
    requests = [request for request, _ in found]
    memory = torch.tensor([[request, wanted[request], 0.0] for request in requests]).reshape(-1, 3)
    bars = [0.0] * len(found)
    for ramp in range(2):
        logits = torch.tensor([numbers[ramp] for _, numbers in found]).reshape(-1, 2)
        score = logits[:, 0].sigmoid()
        far = (logits[:, 1].exp() * exits.slope(score)).clamp(max=1.0)
        lows, highs = (score - far).tolist(), (score + far).tolist()
        for place, request in enumerate(requests):
            own = sorted((low for low, other in zip(lows, requests, strict=True) if other == request), reverse=True)
            if 0 < wanted[request] <= len(own):
                bars[place] = max(bars[place], own[wanted[request] - 1])
        decision = exits.near(logits, 0.0, memory)
        assert decision.leaves.tolist() == [high < bar for high, bar in zip(highs, bars, strict=True)]
        assert decision.memory[:, 2].tolist() == bars
        memory = decision.memory


@given(logits_of_ramps, st.integers(1, 6))
def test_patience_leaves_at_the_first_run_of_agreeing_ramps(ramps: list[list[float]], patience: int) -> None:
    labels = [int(np.argmax(np.float32(logits))) for logits in ramps]
    runs = [len(set(labels[end - patience + 1 : end + 1])) == 1 for end in range(patience - 1, len(labels))]
    expected = runs.index(True) + patience - 1 if True in runs else None
    assert walk(exits.patience, ramps, patience) == expected


@given(logits_of_ramps, st.integers(1, 6))
def test_voting_leaves_when_one_label_has_the_votes(ramps: list[list[float]], votes: int) -> None:
    labels = [int(np.argmax(np.float32(logits))) for logits in ramps]
    enough = [max(labels[: end + 1].count(label) for label in range(3)) >= votes for end in range(len(labels))]
    assert walk(exits.voting, ramps, votes) == (enough.index(True) if True in enough else None)


def test_voting_answers_with_what_was_voted_not_with_the_last_ramp() -> None:
    memory = torch.tensor([[2.0, 0.0, 1.0]])
    decision = exits.voting(torch.tensor([[0.0, 0.0, 5.0]]), 9, memory)
    assert decision.memory.tolist() == [[2, 0, 2]]
    assert decision.answer.argmax() == 2  # two votes each: the deepest ramp breaks the tie
    decision = exits.voting(torch.tensor([[0.0, 0.0, 5.0]]), 9, torch.tensor([[3.0, 0.0, 1.0]]))
    assert decision.answer.argmax() == 0
    assert decision.answer.exp().sum() == pytest.approx(1.0)


@given(logits_of_ramps)
def test_an_input_decides_alike_in_company(ramps: list[list[float]]) -> None:
    others = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for policy in ALL.values():
        memory = torch.zeros(1, memory_width(policy, 3))
        alone = policy(torch.tensor([ramps[0]]), 0.5, memory)
        together = policy(torch.cat((torch.tensor([ramps[0]]), others)), 0.5, memory.expand(5, -1))
        assert together.leaves[0] == alone.leaves[0]
        assert torch.equal(together.memory[:1], alone.memory)


@pytest.mark.parametrize(
    ("name", "never", "sometimes", "always"),
    [
        ("entropy", 0.0, 0.4, 1.1),
        ("confidence", 1.1, 0.9, 1 / 3),
        ("margin", 1.1, 0.5, 0.0),
        ("patience", 7, 3, 1),
        ("voting", 7, 3, 1),
    ],
)
def test_thresholds_never_or_always_fire_by_kind(name: str, never: float, sometimes: float, always: float) -> None:
    random = torch.randn(200, 6, 3, generator=torch.Generator().manual_seed(1)) * 3
    for threshold, verdict in ((never, "never"), (sometimes, "sometimes"), (always, "always")):
        assert reach(ALL[name], threshold, num_labels=3, num_ramps=6) == verdict
        left = {walk(ALL[name], ramps, threshold) for ramps in random.tolist()}
        assert {"never": left == {None}, "always": left == {0}, "sometimes": len(left) > 1}[verdict]


def test_a_policy_of_ones_own_needs_no_declaration() -> None:
    def coin(logits: torch.Tensor, threshold: float, memory: torch.Tensor) -> exits.Decision:
        return exits.Decision(logits[:, 0] > threshold, logits, memory)

    assert memory_width(coin, 10) == 0
    assert reach(coin, 0.5, num_labels=3, num_ramps=2) == "sometimes"
