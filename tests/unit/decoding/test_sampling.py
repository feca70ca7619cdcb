"""Which token is drawn at the edges of what numbers can say."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from isobatch.deployments.decoding.network import DecoderRamps, Draw, adjust, choose
from isobatch.deployments.decoding.ramp_rules import DecoderRamp, DecoderRules
from isobatch.deployments.decoding.sequences import Sampling


@dataclass(frozen=True)
class FixedDraw(Draw):
    """A draw whose random number is given."""

    value: float = 0.0

    @property
    def random(self) -> float:
        return self.value


@pytest.mark.parametrize(
    ("logits", "top_p", "random"),
    [
        ([5.0, 0.0, -5.0], 0.5, 1 - 2**-30),  # as a float32, that is 1
        ([5.0, 0.0, -5.0], 1e-60, 0.3),  # and that is 0
        ([5.0, -200.0, -200.0], 1.0, 1 - 2**-30),  # the others have no probability that it can tell from 0
    ],
)
def test_no_token_is_drawn_outside_the_most_probable_ones(logits: list[float], top_p: float, random: float) -> None:
    draw = FixedDraw(Sampling(1.0, top_p), place=0, value=random)
    assert choose(torch.tensor([logits]), [draw]).tolist() == [0]


numbers = st.floats(-3, 3)
tokens = st.lists(st.integers(0, 7), max_size=6).map(tuple)
biases = st.dictionaries(st.integers(0, 7), numbers, max_size=3).map(lambda result: tuple(result.items()))
samplings = st.builds(
    Sampling, bias=biases, presence=numbers, frequency=numbers, repetition=st.sampled_from([0.5, 1.0, 2.0])
)


rows = st.tuples(st.lists(numbers, min_size=8, max_size=8), samplings, tokens, tokens)


@given(st.lists(rows, min_size=1, max_size=3))
def test_logits_change_by_bias_and_by_what_was_given_and_written(
    rows: list[tuple[list[float], Sampling, tuple[int, ...], tuple[int, ...]]],
) -> None:
    logits = torch.tensor([row for row, _, _, _ in rows], dtype=torch.float64)
    draws = [
        Draw(sampling, 0, frozenset(written[:1]), given_ if sampling.looks_back else (), written)
        for _, sampling, given_, written in rows
    ]
    adjust(logits, draws)
    for result, (row, sampling, given_, written) in zip(logits.tolist(), rows, strict=True):
        for token, logit in enumerate(row):
            wanted = logit + dict(sampling.bias).get(token, 0.0)
            if token in given_ + written:
                wanted = wanted / sampling.repetition if wanted > 0 else wanted * sampling.repetition
            if token in written:
                wanted -= sampling.presence + sampling.frequency * written.count(token)
            assert result[token] == pytest.approx(-math.inf if token in written[:1] else wanted)


@given(st.lists(numbers, min_size=8, max_size=8), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from([0, 3]),
       st.sampled_from([0.3, 1.0]))  # fmt: skip
def test_the_tokens_that_may_be_drawn_are_those_of_transformers(
    row: list[float], min_p: float, top_k: int, top_p: float
) -> None:
    row = [number + place / 1000 for place, number in enumerate(row)]  # no two are equal
    scores = torch.tensor([row])
    for warper in (*([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        scores = warper(None, scores)
    sampling = Sampling(1.0, top_p, top_k=top_k, min_p=min_p)
    draws = [FixedDraw(sampling, place=0, value=part / 4096) for part in range(4096)]
    result = set(choose(torch.tensor([row]).expand(4096, -1), draws).tolist())
    probable = (scores.softmax(dim=1) > 1 / 2048)[0].nonzero()[:, 0].tolist()
    assert set(probable) <= result <= set(scores.isfinite()[0].nonzero()[:, 0].tolist())


def test_all_luck_draws_one_of_the_most_probable_tokens() -> None:
    draws = [FixedDraw(Sampling(1.0, 0.8), place=0, value=random) for random in (0.0, 0.499, 0.501, 1 - 2**-30)]
    logits = torch.tensor([[0.1, 0.4, 0.4, 0.1]]).log().expand(4, -1)
    assert choose(logits, draws).tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("temperature", [1e-9, 1e-38, 1e-60])
def test_next_to_no_temperature_draws_the_most_probable_token(temperature: float) -> None:
    draw = FixedDraw(Sampling(temperature), place=0, value=0.9)
    assert choose(torch.tensor([[1.0, -30.0, 5.0, 4.9]]), [draw]).tolist() == [2]


@pytest.mark.parametrize(("policy", "threshold"), [("entropy", 0.3), ("confidence", 0.9), ("margin", 0.8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_leaves_although_others_may_not_be_written(policy: str, threshold: float, dtype: torch.dtype) -> None:
    """As with `min_tokens` and with JSON: the others have no probability, whose logarithm is not finite."""
    ramps = (DecoderRamp(block=0, threshold=threshold),)
    logits = torch.tensor([[9.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, 9.0]], dtype=dtype)
    adjust(logits, [Draw(Sampling(), 0, frozenset([3]))] * 2)
    leaves = DecoderRamps(DecoderRules(policy=f"isobatch.deployments.exits:{policy}", ramps=ramps)).leave(0, logits)
    assert leaves.tolist() == [1, 0]
