"""What the network alone gives: the reference for whatever a graph answers."""

from collections.abc import Sequence
from typing import Any

from deployments.split import Departed, Order, SplitReplica
from deployments.wire import pack
from profiles.model import SplitModel


def uncut(model: SplitModel, inputs: Sequence[Any]) -> list[tuple[int, int, float]]:
    """(label, exit block, score) of each input, all ramps active, in one batch on one replica."""
    order = Order(model.num_blocks, frozenset(model.ramp_blocks), (pack(model.encode(inputs)),))
    found = {}
    for reply in SplitReplica(model).run(order):
        if isinstance(reply, Departed):
            exits = reply.exits
            scores = exits.probabilities.max(axis=1)
            for row, label, block, score in zip(exits.rows, exits.labels, exits.blocks, scores, strict=True):
                found[int(row)] = (int(label), int(block), float(score))
    return [found[row] for row in range(len(inputs))]
