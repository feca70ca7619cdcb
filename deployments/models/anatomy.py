"""What a family of networks must say about itself to be cut: where its blocks are, and what goes in and comes out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deployments.models.spans import Spans
from deployments.tasks import CLASSIFICATION, TOKENS, Task


def first_tokens(hidden: Tensor, spans: Spans) -> Tensor:
    """What most heads read of a text."""
    return hidden[spans.starts].unsqueeze(1)


@dataclass(frozen=True)
class Anatomy:
    """A network taken apart. Every part is a view of the Hugging Face model: nothing is copied.

    Texts come as one row per token, without padding: `embed` is given the tokens with their places in their texts
    (`position_ids`, from 0), and `spans` tell `block(hidden, spans)` and `pool(hidden, spans)` where texts lie. The
    head is given what `gather` makes of each text, as texts x 1 x width. Images have one row each, and `spans` is None.
    What `pool` gives, one row an input, is what a ramp reads. Where the task answers tokens, `pool`, `gather` and head
    have a row for each of them.
    """

    embed: Callable[[Mapping[str, Tensor]], Tensor]
    blocks: Sequence[Callable[[Tensor, Spans | None], Tensor]]
    head: Callable[[Tensor], Tensor]
    pool: Callable[[Tensor, Spans | None], Tensor]
    pooled_widths: Sequence[int]
    gather: Callable[[Tensor, Spans], Tensor] = first_tokens
    task: Task = CLASSIFICATION


@dataclass(frozen=True)
class Family:
    """Networks of one architectural idea: the Hugging Face `model_type`s it covers, and how to take one apart."""

    model_types: tuple[str, ...]
    reads: Literal["text", "image"]
    dissect: Callable[[Any], Anatomy]


def pool_tokens(hidden: Tensor, spans: Spans | None) -> Tensor:
    """The first token beside the mean of all: heads read the former, early ramps learn more from the latter."""
    hidden = hidden.float()  # in half precision the mean of many tokens would depend on how it is added up
    if spans is None:
        return torch.cat((hidden[:, 0], hidden.mean(dim=1)), dim=1)
    return torch.cat((hidden[spans.starts], spans.mean(hidden)), dim=1)


def each_token(anatomy: Anatomy, model: Any) -> Anatomy:
    """The same blocks where head and ramps answer every token. Heads are Hugging Face's own, for all families alike."""
    before = getattr(model, "head", nn.Identity())  # ModernBERT's
    return replace(
        anatomy,
        head=lambda hidden: model.classifier(before(hidden)),
        pool=lambda hidden, spans: hidden.float(),
        pooled_widths=[model.config.hidden_size] * len(anatomy.blocks),
        gather=lambda hidden, spans: hidden,
        task=TOKENS,
    )


def call_transformer_layer(layer: nn.Module) -> Callable[[Tensor, Spans | None], Tensor]:
    """Hugging Face's own layers take (hidden, mask) and return the next hidden state.

    Those of texts are given one long row of tokens, and hand `spans` to our attention in the mask's place.
    """

    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        after: Tensor = layer(hidden, None) if spans is None else layer(hidden.unsqueeze(0), spans).squeeze(0)
        return after

    return run
