"""What a family of networks must say about itself to be cut: where its blocks are, and what goes in and comes out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Anatomy:
    """A network taken apart. Every part is a view of the Hugging Face model: nothing is copied.

    `blocks` are called as `block(hidden, attention_mask)`; `pool(hidden, present)` gives what a ramp reads, one row an
    input, where `present` marks the tokens that are not padding (None: no padding).
    """

    embed: Callable[[Mapping[str, Tensor]], Tensor]
    blocks: Sequence[Callable[[Tensor, Tensor | None], Tensor]]
    head: Callable[[Tensor], Tensor]
    pool: Callable[[Tensor, Tensor | None], Tensor]
    pooled_widths: Sequence[int]


@dataclass(frozen=True)
class Family:
    """Networks of one architectural idea: the Hugging Face `model_type`s it covers, and how to take one apart."""

    model_types: tuple[str, ...]
    task: Literal["text", "image"]
    dissect: Callable[[Any], Anatomy]


def pool_tokens(hidden: Tensor, present: Tensor | None) -> Tensor:
    """The first token beside the mean of all: heads read the former, early ramps learn more from the latter."""
    hidden = hidden.float()  # in half precision the mean of many tokens would depend on how it is added up
    if present is None:
        return torch.cat((hidden[:, 0], hidden.mean(dim=1)), dim=1)
    weights = present.float().unsqueeze(-1)
    return torch.cat((hidden[:, 0], (hidden * weights).sum(dim=1) / weights.sum(dim=1)), dim=1)


def call_transformer_layer(layer: nn.Module) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Hugging Face's own layers take (hidden, mask) and return the next hidden state."""

    def run(hidden: Tensor, mask: Tensor | None) -> Tensor:
        after: Tensor = layer(hidden, mask)
        return after

    return run
