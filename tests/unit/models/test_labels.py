"""Networks with several labels: probabilities are transformers' own, and an input leaves when every label is sure."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch import load
from isobatch.deployments.exits import confidence, entropy, margin
from isobatch.deployments.models import TorchModel, checkpoint
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps, make_head, save_ramps
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.errors import UserError
from tests.helpers.backend_parity import assert_as_alone, assert_same
from tests.helpers.tiny_labels import NAMES, flags, label_network, reference_logits, texts
from tests.helpers.tiny_words import word_network

POLICIES = {"confidence": (confidence, 0.8), "entropy": (entropy, 0.7), "margin": (margin, 0.6)}


@cache
def plain() -> TorchModel:
    return load(label_network())


def with_random_ramps(policy: str = "confidence", seed: int = 0) -> TorchModel:
    threshold = POLICIES[policy][1]
    torch.manual_seed(seed)
    heads = {block: make_head("light", 48, len(NAMES)).eval() for block in range(3)}
    for head in heads.values():
        head.weight.data *= 6.0
    path = f"isobatch.deployments.exits:{policy}"
    rules = [RampRule(block=block, threshold=threshold, temperature=1.0 + block / 4) for block in heads]
    return plain().with_ramps(Ramps(ExitRules(policy=path, ramps=tuple(rules)), heads))


def inputs(count: int, seed: int = 3) -> list[str]:
    return [each for each, _ in texts(count, seed)]


def sigmoid(logits: Any) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.asarray(logits))))


def test_without_exits_the_probabilities_are_transformers_own() -> None:
    some, model = inputs(20), with_random_ramps()
    expected = sigmoid(reference_logits(some))
    answers = model.predict(some, exits=False)
    assert np.abs(np.array([each.probabilities for each in answers]) - expected).max() < 1e-5
    assert [each.label for each in answers] == [tuple(row) for row in (expected > 0.5).astype(int).tolist()]
    for answer, row in zip(answers, expected, strict=True):
        assert answer.name == tuple(name for name, share in zip(NAMES, row, strict=True) if share > 0.5)
        assert answer.score == pytest.approx(np.maximum(row, 1 - row), abs=1e-5)
    assert (np.array([each.label for each in answers]) == flags(texts(20, 3))).mean() > 0.9, "it has learned something"


@pytest.mark.parametrize("policy", POLICIES)
@torch.inference_mode()
def test_an_input_leaves_at_the_first_ramp_where_each_of_its_labels_would_leave_alone(policy: str) -> None:
    model, some = with_random_ramps(policy), inputs(40)
    rule, threshold = POLICIES[policy]
    batch = model.encode(some)
    pooled, head = model.features(batch)
    ramps = [model.ramps.logits(block, each).tolist() for block, each in enumerate(pooled)]
    result = model.run(batch, 4, model.ramp_blocks).exits
    for row, block, logits in zip(result.rows, result.blocks, result.logits_by_input, strict=True):
        expected, answer = 3, head[row].tolist()
        for ramp in range(3):
            alone = [rule(torch.tensor([[0.0, z]]), threshold, torch.zeros(1, 0)).leaves for z in ramps[ramp][row]]
            if all(map(bool, alone)):
                expected, answer = ramp, ramps[ramp][row]
                break
        assert block == expected
        assert logits[:, 1] - logits[:, 0] == pytest.approx(answer, abs=1e-4)
    assert 0 < (result.blocks < 3).sum() < 40


@settings(max_examples=15)
@given(seed=st.integers(0, 99), data=st.data())
def test_an_input_has_what_it_has_alone_whoever_is_beside_it(seed: int, data: st.DataObject) -> None:
    model, some = with_random_ramps(), inputs(6, seed)
    alone = [model.run(model.encode([each]), 4, model.ramp_blocks).exits for each in some]
    stops = [*sorted(data.draw(st.sets(st.integers(1, 3)))), 4]
    assert_as_alone(model, model.encode(some), range(6), alone, stops)


def test_a_replica_answers_and_audits_as_the_network_does() -> None:
    model = with_random_ramps()
    batch = model.encode(inputs(5))
    order = Order(4, frozenset(model.ramp_blocks), (pack(batch),), kinds=bytes([1, 0, 1, 0, 1]))
    replies = [reply for reply in SplitReplica(model).run(order) if hasattr(reply, "exits")]
    full = model.run(batch, 4, ()).exits.answers()
    last = {int(row): answer for reply in replies for row, answer in zip(reply.exits.rows, reply.exits.answers())}  # noqa: B905
    assert [last[row][0] for row in (0, 2, 4)] == [full[row][0] for row in (0, 2, 4)]
    assert all(len(labels) == len(NAMES) for labels, _ in last.values())


def test_onnx_gives_what_torch_gives(tmp_path: Path) -> None:
    model = with_random_ramps()
    batch, served = model.encode(inputs(6)), OnnxModel(model, "labels", cache=tmp_path)
    served.prepare([BlockRange(2, 4, (2,))], batch)
    middle = model.run(batch, 2, ()).survivors
    assert_same(*(one.run(middle, 4, model.ramp_blocks) for one in (model, served)))
    assert not served.exported.requested


@pytest.mark.parametrize(("network", "width"), [(label_network, 48), (word_network, 24)])
def test_a_policy_that_remembers_is_refused_where_an_input_has_several_answers(
    tmp_path: Path, network: Callable[[], Path], width: int
) -> None:
    shutil.copytree(network(), tmp_path, dirs_exist_ok=True)
    heads = {0: make_head("light", width, 4)}
    rules = ExitRules(policy="isobatch.deployments.exits:patience", ramps=(RampRule(block=0, threshold=2),))
    save_ramps(tmp_path, rules, heads)
    with pytest.raises(UserError, match="patience remembers earlier ramps of an input, but this network answers its"):
        load(tmp_path)
    save_ramps(tmp_path, rules.model_copy(update={"policy": "isobatch.deployments.exits:margin"}), heads)
    assert load(tmp_path).predict(["ada saw rome"])[0].exit_block in (0, 3)


def test_a_level_of_a_cascade_gives_one_label() -> None:
    with pytest.raises(UserError, match="gives an input several labels: a cascade is made of networks that give one"):
        checkpoint.check_level(label_network())
