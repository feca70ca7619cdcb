"""Chooses the next token from its logits: the most probable one, or a random one.

A random number depends only on the seed and on the token's position. So a restarted sequence writes the same tokens,
and a ramp and the full network use the same number: they choose the same token where their probabilities are similar.
"""

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from hashlib import blake2b
from math import inf

import torch
from torch import Tensor

from isobatch.deployments.decoding.sequences import Sampling

# Logits that are divided by a much lower temperature would overflow.
COLDEST = 1e-6


@dataclass(frozen=True)
class Draw:
    """How the token at one position of a sequence is chosen; `banned`: tokens that are not."""

    sampling: Sampling
    place: int
    banned: frozenset[int] = frozenset()

    @property
    def random(self) -> float:
        """A random number from 0 to 1.

        >>> Draw(Sampling(seed=7), 3).random == Draw(Sampling(1.0, seed=7), 3).random
        True
        """
        digest = blake2b(f"{self.sampling.seed} {self.place}".encode(), digest_size=6).digest()
        return int.from_bytes(digest) / 2**48


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in float32 at least: tokens are chosen in this precision, whatever the network runs in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def ban(logits: Tensor, draws: Listed[Draw]) -> None:
    """Give banned tokens no probability."""
    banned = [(row, token) for row, draw in enumerate(draws) for token in draw.banned]
    if banned:
        rows, tokens = zip(*banned, strict=True)
        logits[list(rows), list(tokens)] = -inf


def choose(logits: Tensor, draws: Listed[Draw]) -> Tensor:
    """The token of each row of logits."""
    tokens = logits.argmax(dim=1)
    rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if rows:
        tokens[rows] = _drawn(logits[rows], [draws[row] for row in rows])
    return tokens


def _drawn(logits: Tensor, draws: Listed[Draw]) -> Tensor:
    """Tokens chosen at random among the `top_k` most probable ones that have the share `top_p` of their probability."""
    temperature, top_p, top_k, random = (
        logits.new_tensor(column).unsqueeze(1)
        for column in zip(
            *(
                (each.sampling.temperature, each.sampling.top_p, each.sampling.top_k or logits.shape[1], each.random)
                for each in draws
            ),
            strict=True,
        )
    )
    ordered, tokens = (logits / temperature.clamp(min=COLDEST)).softmax(dim=1).sort(dim=1, descending=True, stable=True)
    ordered[torch.arange(logits.shape[1], device=logits.device) >= top_k] = 0.0
    others = ordered.cumsum(dim=1) - ordered >= top_p * ordered.sum(dim=1, keepdim=True)
    others[:, 0] = False  # the most probable token stays even if `top_p` is rounded to 0
    ordered[others] = 0.0
    summed = ordered.cumsum(dim=1)
    place = (summed <= random * summed[:, -1:]).sum(dim=1, keepdim=True)
    last = (ordered > 0).sum(dim=1, keepdim=True) - 1  # where the random number is rounded to 1
    return tokens.gather(1, place.minimum(last).clamp(min=0)).squeeze(1)
