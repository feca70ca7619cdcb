"""Which token is drawn at the edges of what numbers can say."""

from dataclasses import dataclass

import pytest
import torch

from isobatch.deployments.decoding.network import Draw, choose
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


def test_all_luck_draws_one_of_the_most_probable_tokens() -> None:
    draws = [FixedDraw(Sampling(1.0, 0.8), place=0, value=random) for random in (0.0, 0.499, 0.501, 1 - 2**-30)]
    logits = torch.tensor([[0.1, 0.4, 0.4, 0.1]]).log().expand(4, -1)
    assert choose(logits, draws).tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("temperature", [1e-9, 1e-38, 1e-60])
def test_next_to_no_temperature_draws_the_most_probable_token(temperature: float) -> None:
    draw = FixedDraw(Sampling(temperature), place=0, value=0.9)
    assert choose(torch.tensor([[1.0, -30.0, 5.0, 4.9]]), [draw]).tolist() == [2]
