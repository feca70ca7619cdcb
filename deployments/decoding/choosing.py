"""Which token comes next, given its logits: the most probable one, or one that is drawn.

A draw depends on the seed and on the token's place alone. So a sequence that begins again writes the same, and a ramp
and the full network draw with the same luck: they choose the same token wherever their probabilities are alike.
"""

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from deployments.decoding.sequences import Sampling

COLDEST = 1e-6  # logits divided by a temperature far below could be no numbers any more


@dataclass(frozen=True)
class Draw:
    """The token at this place of a sequence."""

    sampling: Sampling
    place: int

    @property
    def luck(self) -> float:
        """A number from 0 to 1.

        >>> Draw(Sampling(seed=7), 3).luck == Draw(Sampling(1.0, seed=7), 3).luck
        True
        """
        drawn = blake2b(f"{self.sampling.seed} {self.place}".encode(), digest_size=6).digest()
        return int.from_bytes(drawn) / 2**48


def at_least_float32(logits: Tensor) -> Tensor:
    """Decisions are made in float32, whatever the network runs in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def choose(logits: Tensor, draws: Listed[Draw]) -> Tensor:
    """The token of each row."""
    tokens = logits.argmax(dim=1)
    rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if rows:
        tokens[rows] = _drawn(logits[rows], [draws[row] for row in rows])
    return tokens


def _drawn(logits: Tensor, draws: Listed[Draw]) -> Tensor:
    """The most probable tokens that together have `top_p` share the luck, in the order of their probabilities."""
    temperature, top_p, luck = (
        logits.new_tensor(told).unsqueeze(1)
        for told in zip(*((one.sampling.temperature, one.sampling.top_p, one.luck) for one in draws), strict=True)
    )
    ordered, tokens = (logits / temperature.clamp(min=COLDEST)).softmax(dim=1).sort(dim=1, descending=True, stable=True)
    others = ordered.cumsum(dim=1) - ordered >= top_p
    others[:, 0] = False  # even where `top_p` is so small that it is rounded to 0
    ordered[others] = 0.0
    summed = ordered.cumsum(dim=1)
    place = (summed <= luck * summed[:, -1:]).sum(dim=1, keepdim=True)
    last = (ordered > 0).sum(dim=1, keepdim=True) - 1  # for luck that is rounded to 1
    return tokens.gather(1, place.minimum(last).clamp(min=0)).squeeze(1)
