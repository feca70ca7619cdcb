"""Cascades of tiny, randomly initialised networks, and the same by hand: every network by itself, input by input."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isobatch.deployments.exits import confidence
from isobatch.deployments.models.cascade import Cascade, Level
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.model import Batch
from tests.helpers.tiny_networks import NoEncoder, network, random_inputs

ORDERS = ((0, 1, 2), (2, 0, 1), (1, 0, 2))
LABELS = ("a", "b", "c")


def levels_of(names: Sequence[str], inner: float | None, weights: Sequence[float]) -> list[Level]:
    """Tiny networks one behind the other, each with its labels in another order; with `inner`, ramps inside them."""
    levels, start = list[Level](), 0
    for number, name in enumerate(names):
        model = network(name, "confidence" if inner is not None else None, [inner or 0.0])
        stop = start + model.num_blocks
        order = ORDERS[number % len(ORDERS)]
        levels.append(Level(start, stop, weights[number], NoEncoder(24), order, Path(name), lambda model=model: model))
        start = stop
    return levels


def cascade(names: Sequence[str], threshold: float, weights: Sequence[float], inner: float | None = None) -> Cascade:
    """`threshold`: of confidence, at the edges; `inner`: at the ramps inside the levels."""
    levels = levels_of(names, inner, weights)
    rules = [
        RampRule(block=level.start + block, threshold=inner or 0.0)
        for level in levels
        for block in level.model.ramp_blocks
    ]
    rules += [RampRule(block=level.stop - 1, threshold=threshold) for level in levels[:-1]]
    ordered = tuple(sorted(rules, key=lambda rule: rule.block))
    ramps = Ramps(ExitRules(policy="isobatch.deployments.exits:confidence", ramps=ordered))
    return Cascade(levels, ramps, LABELS, torch.device("cpu"), torch.float32)


def inputs_of(names: Sequence[str], count: int, seed: int) -> list[Batch]:
    """Batches of one input, each with texts of other lengths for every level."""
    every = [random_inputs(name, count, seed + number) for number, name in enumerate(names)]
    starts = np.cumsum([0, *(network(name).num_blocks for name in names)]).tolist()
    batches = []
    for own in zip(*every, strict=True):
        batch: Batch | None = None
        for start, one in reversed(list(zip(starts, own, strict=False))):
            batch = replace(one, cursor=start, ahead=batch)
        batches.append(batch)
    return batches


def by_hand(
    names: Sequence[str], one: Batch, threshold: float, weights: Sequence[float], inner: float | None, open_: set[int]
) -> tuple[int, np.ndarray]:
    """The block an input leaves after, and its probabilities: each network alone, one behind the other."""
    before, start, here = None, 0, one
    for number, name in enumerate(names):
        model = network(name, "confidence" if inner is not None else None, [inner or 0.0])
        local = {ramp - start for ramp in open_ if start <= ramp < start + model.num_blocks - 1}
        block, own = _alone(model, replace(here, cursor=0, ahead=None), local)
        own = own[list(ORDERS[number % len(ORDERS)])]
        if block < model.num_blocks - 1:
            return start + block, own
        believed = own if before is None else weights[number] * own + (1 - weights[number]) * before
        last = start + model.num_blocks - 1
        if number + 1 == len(names) or (last in open_ and _sure(believed, threshold)):
            return last, believed
        before, start, here = believed, start + model.num_blocks, here.ahead
    raise AssertionError("the last level answers")


def _alone(model: TorchModel, one: Batch, ramps: set[int]) -> tuple[int, np.ndarray]:
    exits = model.run(one, model.num_blocks, ramps).exits
    return int(exits.blocks[0]), exits.probabilities[0]


def _sure(believed: np.ndarray, threshold: float) -> bool:
    logits = torch.from_numpy(believed).log()[None]
    return bool(confidence(logits, threshold, torch.zeros(1, 0)).leaves[0])


def answers_of(model: Cascade, batch: Batch, stops: Sequence[int], ramps: set[int]) -> Mapping[int, tuple[int, Any]]:
    """Who left where and with which probabilities, when the cascade runs from stop to stop."""
    rows, here, ends = np.arange(len(batch)), batch, dict[int, tuple[int, Any]]()
    for stop in [*stops, model.num_blocks]:
        launched = model.run(here, stop, ramps)
        left = launched.exits
        for row, block, p in zip(rows[left.rows].tolist(), left.blocks.tolist(), left.probabilities, strict=True):
            ends[row] = block, p
        rows = np.delete(rows, left.rows)
        if launched.survivors is None:
            break
        here = launched.survivors
        assert len(here) == len(rows)
    assert len(rows) == 0
    return ends
