"""The description of a network that lets us cut it: where its blocks are, and what goes in and comes out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isobatch.deployments.models.spans import Spans
from isobatch.deployments.tasks import CLASSIFICATION, TOKENS, Task


def first_tokens(hidden: Tensor, spans: Spans) -> Tensor:
    """The first token of each text, which most heads read."""
    return hidden.index_select(0, spans.starts).unsqueeze(1)


@dataclass(frozen=True)
class Anatomy:
    """The parts of a network. Every part is a view of the Hugging Face model: nothing is copied.

    Texts come as one row per token, without padding: `embed` gets the tokens with their positions in their texts
    (`position_ids`, from 0), and `spans` tells `block(hidden, spans)` and `pool(hidden, spans)` where texts lie. The
    head reads the output of `gather`: texts x 1 x width. Images have one row each, and `spans` is None. A ramp reads
    the output of `pool`, one row per input. Where the task answers tokens, `pool`, `gather` and the head have one row
    per token.

    Where the head reads features of several blocks, what passes between blocks is all of these: `packed` puts them into
    one row per input, and `unpacked(hidden, block)` takes them out of it before a block. Where the task answers pixels
    or points, the head has one row for each, and a ramp is a `bridge(block)`: a module that reads the output of `pool`.
    """

    embed: Callable[[Mapping[str, Tensor]], Any]
    blocks: Sequence[Callable[[Any, Spans | None], Any]]
    head: Callable[[Any], Tensor]
    pool: Callable[[Any, Spans | None], Tensor]
    pooled_widths: Sequence[int]
    gather: Callable[[Tensor, Spans], Tensor] = first_tokens
    task: Task = CLASSIFICATION
    token_width: int | None = None  # of a token's hidden state, if it is the same after all blocks
    unpacked: Callable[[Tensor, int], Any] = lambda hidden, block: hidden
    packed: Callable[[Any], Tensor] = lambda hidden: hidden
    bridge: Callable[[int], nn.Module] | None = None
    release: Callable[[], None] = lambda: None  # frees a GPU's memory of weights, which come back when they are used


@dataclass(frozen=True)
class Family:
    """Networks of one architecture: the Hugging Face `model_type`s it covers, and the function that finds the parts."""

    model_types: tuple[str, ...]
    reads: Literal["text", "image"]
    dissect: Callable[[Any], Anatomy]
    one_size: bool = False  # whether the preprocessor decides on the size of all images: `config.image_size`
    # The task of heads that give maps, by the configuration; None: such heads are not known.
    map_task: Callable[[Any], Task] | None = None
    any_size: bool = False  # whether images may have any size, whatever the configuration says
    reads_last: bool = False  # whether heads read a text's last token, but transformers skips padding tokens there
    reads_types: bool = False  # whether types of tokens are read if the tokenizer gives some, without a table of them


def pool_tokens(hidden: Tensor, spans: Spans | None) -> Tensor:
    """The first token beside the mean of all tokens: heads read the former, early ramps learn more from the latter."""
    hidden = hidden.float()  # in half precision the mean of many tokens would depend on the order of its sum
    if spans is None:
        return torch.cat((hidden[:, 0], hidden.mean(dim=1)), dim=1)
    return torch.cat((hidden.index_select(0, spans.starts), spans.mean(hidden)), dim=1)


def transformer(
    model: Any,
    embed: Callable[[Mapping[str, Tensor]], Tensor],
    blocks: Sequence[Callable[[Tensor, Spans | None], Tensor]],
    head: Callable[[Tensor], Tensor],
    gather: Callable[[Tensor, Spans], Tensor] = first_tokens,
) -> Anatomy:
    """The anatomy of a network whose blocks all have the same width, and whose ramps read `pool_tokens`."""
    width = model.config.hidden_size
    return Anatomy(embed, blocks, head, pool_tokens, [2 * width] * len(blocks), gather, token_width=width)


def token_anatomy(anatomy: Anatomy, model: Any) -> Anatomy:
    """The same blocks with a head and ramps that answer every token. All families share Hugging Face's token head."""
    dense = getattr(model, "head", nn.Identity())  # only ModernBERT has one
    return replace(
        anatomy,
        head=lambda hidden: model.classifier(dense(hidden)),
        pool=lambda hidden, spans: hidden.float(),
        pooled_widths=[model.config.hidden_size] * len(anatomy.blocks),
        gather=lambda hidden, spans: hidden,
        task=TOKENS,
    )


def call_transformer_layer(layer: nn.Module) -> Callable[[Tensor, Spans | None], Tensor]:
    """A block that calls a Hugging Face layer, which takes (hidden, mask) and returns the next hidden state.

    A layer of a text network gets all texts as one long row of tokens, and passes `spans` to our attention as the mask.
    """
    parts: list[Any] = [*layer.modules()]
    for part in parts:
        if hasattr(part, "chunk_size_feed_forward"):
            part.chunk_size_feed_forward = 0  # chunks save memory, but fail unless their size divides that of the row

    def run(hidden: Tensor, spans: Spans | None) -> Tensor:
        after: Tensor = layer(hidden, None) if spans is None else layer(hidden.unsqueeze(0), spans).squeeze(0)
        return after

    return run
