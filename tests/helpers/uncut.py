"""The answers of the network alone, as the reference for a graph's answers."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isobatch.deployments.models import load_served
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.model import SplitModel
from tests.helpers.asking import predict

Answer = tuple[int, int, float]  # label, exit block, score


def uncut(model: SplitModel, inputs: Sequence[Any], ramps: Collection[int] | None = None) -> list[Answer]:
    """The answer to each input in one batch on one replica; ramps: the active ones, None: all."""
    active = frozenset(model.ramp_blocks if ramps is None else ramps)
    order = Order(model.num_blocks, active, (pack(model.encode(inputs)),))
    result = {}
    for reply in SplitReplica(model).run(order):
        if isinstance(reply, Departed):
            exits = reply.exits
            scores = exits.probabilities.max(axis=1)
            for row, label, block, score in zip(exits.rows, exits.labels, exits.blocks, scores, strict=True):
                result[int(row)] = (int(label), int(block), float(score))
    return [result[row] for row in range(len(inputs))]


def answers_as_uncut(base: str, checkpoint: Path, inputs: Sequence[Any], clients: int) -> list[dict[str, Any]]:
    """Check that many clients at once get the same answers as each input would get alone."""
    with ThreadPoolExecutor(clients) as pool:
        answers = [outputs[0] for outputs in pool.map(lambda one: predict(base, one), inputs)]
    model = load_served(checkpoint)
    for one, answer in zip(inputs, answers, strict=True):
        assert_same(answer, *uncut(model, [one]))
    return answers


def assert_same(answer: dict[str, Any], expected: Answer) -> None:
    label, block, score = expected
    assert (answer["label"], answer["exit_block"]) == (label, block)
    assert answer["score"] == pytest.approx(score, abs=1e-4)
