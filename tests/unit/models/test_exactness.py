"""Cut anywhere, merged in any way, left at any ramp: the answers are those of the uncut network."""

import threading
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Order
from isobatch.deployments.transport.packed import pack
from tests.helpers.backend_parity import assert_as_alone, assert_same, batch_for, run_in_splits
from tests.helpers.tiny_networks import (
    DISTINCT_FAMILIES,
    FAMILIES,
    HEADS,
    network,
    random_inputs,
    reference_logits,
    with_memory,
)

# Hugging Face's own attention, or mean of tokens, rounds to the dtype on its way.
ROUNDED = ("mpnet", "deberta-v3", "modernbert-mean")
POLICIES = {"entropy": 0.8, "confidence": 0.6, "margin": 0.4, "patience": 2, "voting": 2}
# Each family with a policy that remembers and with one that does not, and each policy with several families.
PAIRS = [
    (name, policy)
    for number, name in enumerate(DISTINCT_FAMILIES)
    for policy in (("entropy", "confidence", "margin")[number % 3], ("patience", "voting")[number % 2])
]
STRICTER = {"entropy": 0.3, "confidence": 0.95, "margin": 0.9, "patience": 3, "voting": 3}


@pytest.mark.parametrize("name", FAMILIES + HEADS)
def test_every_pair_of_cuts_equals_the_uncut_network(name: str) -> None:
    """Texts of one length and of several."""
    model = network(name)
    cut_points = range(1, model.num_blocks)
    every_cutting = [[], *[[a] for a in cut_points], *[list(pair) for pair in combinations(cut_points, 2)]]
    for size, padded in ((1, False), (4, False), (6, True)):
        batch = model.merge(random_inputs(name, size, seed=size, padded=padded))
        expected = reference_logits(name, batch)
        for cuts in every_cutting:
            assert np.abs(run_in_splits(model, batch, cuts).logits - expected).max() < 1e-5


@settings(max_examples=20)
@given(data=st.data(), name=st.sampled_from(FAMILIES), policy=st.sampled_from([None, *POLICIES]))
def test_any_merging_gives_each_input_what_it_has_alone(data: st.DataObject, name: str, policy: str | None) -> None:
    model = network(name, policy, [POLICIES[policy]] if policy else [])
    inputs = [with_memory(batch, model) for batch in random_inputs(name, 6, seed=data.draw(st.integers(0, 99)))]
    alone = [model.run(single, model.num_blocks, model.ramp_blocks).exits for single in inputs]
    inside = dict(enumerate(inputs))
    for stop in range(1, model.num_blocks + 1):
        order, size = data.draw(st.permutations([*inside])), data.draw(st.integers(1, 6))
        for rows in (order[start : start + size] for start in range(0, len(order), size)):
            launched = model.run(model.merge([inside.pop(row) for row in rows]), stop, model.ramp_blocks)
            exits = launched.exits
            for place, block, logits in zip(exits.rows, exits.blocks, exits.logits, strict=True):
                assert block == alone[rows[place]].blocks[0]
                assert np.abs(logits - alone[rows[place]].logits[0]).max() < 1e-4
            for place, row in enumerate(row for place, row in enumerate(rows) if place not in exits.rows):
                inside[row] = model.select(launched.survivors, np.array([place]))
    assert not inside


@pytest.mark.parametrize(("name", "policy"), PAIRS)
def test_each_input_leaves_where_it_leaves_alone(name: str, policy: str) -> None:
    model = network(name, policy, [POLICIES[policy]])
    inputs = [with_memory(batch, model) for batch in random_inputs(name, count=12, seed=3)]
    alone = [model.run(batch, model.num_blocks, model.ramp_blocks).exits for batch in inputs]
    assert len({int(exits.blocks[0]) for exits in alone}) > 1, "the test wants inputs that leave at different blocks"
    for cuts in ([], [1], [2], list(range(1, model.num_blocks))):
        assert_as_alone(model, model.merge(inputs), range(12), alone, [*cuts, model.num_blocks])


@pytest.mark.parametrize(("name", "policy"), PAIRS)
def test_who_is_kept_is_told_its_exit_and_goes_on_as_if_there_were_no_ramp(name: str, policy: str) -> None:
    model = network(name, policy, [POLICIES[policy]])
    batch = model.merge([with_memory(each, model) for each in random_inputs(name, count=12, seed=3)])
    kept, (first, *_) = np.arange(0, 12, 2), model.ramp_blocks
    plain, closed = (model.run(batch, first + 1, ramps) for ramps in ([first], []))
    launched = model.run(batch, first + 1, [first], kept)
    assert launched.exits.rows.tolist() == plain.exits.rows.tolist()
    assert np.array_equal(launched.exits.logits, plain.exits.logits)
    inside = sorted({*range(12)} - set(plain.exits.rows.tolist()) | set(kept.tolist()))
    ended = model.run(launched.survivors, model.num_blocks, [], np.arange(len(inside)))
    assert ended.survivors is None
    wanted = model.run(model.select(closed.survivors, np.array(inside)), model.num_blocks, []).exits.logits
    assert np.array_equal(ended.exits.logits, wanted)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_may_bring_thresholds_of_its_own(policy: str) -> None:
    model, strict = (network("distilbert", policy, [each]) for each in (POLICIES[policy], STRICTER[policy]))
    batch = model.merge([with_memory(each, model) for each in random_inputs("distilbert", 24, seed=3)])
    thresholds = dict.fromkeys(model.ramp_blocks, STRICTER[policy])
    own, given, wanted = (
        network.run(batch, model.num_blocks, ramps).exits.blocks.tolist()
        for network, ramps in ((model, model.ramp_blocks), (model, thresholds), (strict, model.ramp_blocks))
    )
    assert given == wanted != own
    assert model.run(batch, model.num_blocks, dict.fromkeys(model.ramp_blocks)).exits.blocks.tolist() == own


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES + HEADS)
def test_half_precision_equals_the_uncut_network(name: str, dtype: torch.dtype) -> None:
    """Of texts of several lengths and of one. Rows that round their number up change nothing."""
    model, near = network(name, dtype=dtype), torch.finfo(dtype).eps if name in ROUNDED else 1e-3
    for padded in (True, False):
        batch = model.merge(random_inputs(name, 5, seed=2, padded=padded))
        expected = reference_logits(name, batch, dtype)
        for cuts in ([], [1, 2]):
            assert np.abs(run_in_splits(model, batch, cuts).logits - expected).max() <= near * np.abs(expected).max()


def test_survivors_in_two_precisions_get_their_own_answers() -> None:
    """They may come to one launch, where a GPU computes in another precision than a CPU."""
    model, half, parts, expected = network("bert"), network("bert", dtype=torch.bfloat16), [], []
    for before, each in zip([model, model, half, half], random_inputs("bert", 4, seed=2), strict=True):
        parts.append(pack(before.run(each, 1, ()).survivors))
        expected += list(run_in_splits(model, each, [1]).logits)
    departed, _ = SplitReplica(model).run(Order(model.num_blocks, frozenset(), tuple(parts)))
    assert isinstance(departed, Departed)
    assert np.abs(departed.exits.logits - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("stop", "ramps", "message"),
    [(0, (), r"stop = 0 must lie in 1..4"), (5, (), r"stop = 5"), (2, (3,), "no ramp after block 3")],
)
def test_a_wrong_call_names_the_value(stop: int, ramps: tuple[int, ...], message: str) -> None:
    model = network("bert", "entropy", [0.5])
    batch = with_memory(random_inputs("bert", 1, seed=0)[0], model)
    with pytest.raises(ValueError, match=message):
        model.run(batch, stop, ramps)
    with pytest.raises(ValueError, match=r"the same block, got \[0, 1\]"):
        model.merge([batch, model.run(batch, 1, ()).survivors])


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_threads_that_share_a_network_get_their_own_answers(backend: str, tmp_path: Any) -> None:
    exact = network("bert", "entropy", [0.8])
    model = exact if backend == "torch" else OnnxModel(exact, "bert, shared", cache=tmp_path)
    model.prepare([BlockRange(0, 2, (0, 1))], batch_for(exact, "bert"))
    batches = [batch_for(exact, "bert", size, seed) for seed, size in enumerate([1, 3, 5, 8] * 3)]
    expected = [exact.run(batch, 2, (0, 1)) for batch in batches]
    result: dict[int, Any] = {}

    def compute(first: int) -> None:
        for number in range(first, len(batches), 3):
            result[number] = model.run(batches[number], 2, (0, 1))

    threads = [threading.Thread(target=compute, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, launched in enumerate(expected):
        assert_same(launched, result[number])
