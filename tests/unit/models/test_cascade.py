"""A cascade is its networks run by hand, one behind the other: for every threshold, weight, cut and company."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Order
from isobatch.deployments.transport.packed import pack, take
from isobatch.profiles.model import Batch, Launched, edges_of, label_names, reads_text
from tests.helpers.tiny_cascades import answers_of, by_hand, cascade, inputs_of
from tests.helpers.tiny_networks import network

PAIRS = (("bert", "roberta"), ("distilbert", "electra"), ("albert", "bert"), ("electra", "bert", "distilbert"))
SHARES = st.floats(0.0, 1.0, allow_nan=False)


@settings(max_examples=15, derandomize=True)
@given(
    st.data(), st.sampled_from(PAIRS), st.floats(0.3, 1.1), st.sampled_from([None, 0.5, 0.7]), st.integers(0, 99),
    st.integers(1, 6),
)  # fmt: skip
def test_a_cascade_is_its_networks_run_by_hand(
    data: st.DataObject, names: tuple[str, ...], threshold: float, inner: float | None, seed: int, count: int
) -> None:
    weights = [1.0, *(data.draw(SHARES) for _ in names[1:])]
    model = cascade(names, threshold, weights, inner)
    stops = sorted(data.draw(st.sets(st.integers(1, model.num_blocks - 1), max_size=4)))
    ramps = data.draw(st.sets(st.sampled_from(model.ramp_blocks)))
    inputs = inputs_of(names, count, seed)
    result = answers_of(model, model.merge(inputs), stops, ramps)
    for row, one in enumerate(inputs):
        block, probabilities = by_hand(names, one, threshold, weights, inner, ramps)
        assert result[row][0] == block
        assert result[row][1] == pytest.approx(probabilities, abs=1e-4)


def test_who_is_kept_is_told_of_and_goes_on() -> None:
    """As audits need it: at a ramp inside a level and at the edge, in one call or in several."""
    names = ("bert", "roberta")
    model, inputs = cascade(names, 0.0, [1.0, 0.5], inner=0.0), inputs_of(names, 3, seed=2)
    kept, batch = np.array([0, 2]), model.merge(inputs)
    open_ = set(model.ramp_blocks)
    for stop in range(1, 5):
        launched = model.run(batch, stop, {stop - 1}, kept)
        assert launched.exits.rows.tolist() == [0, 1, 2]
        assert set(launched.exits.blocks.tolist()) == {stop - 1}
        assert len(launched.survivors) == 2
    full = answers_of(cascade(names, 2.0, [1.0, 0.5]), batch, [], set())
    at_once = model.run(batch, model.num_blocks, open_, kept).exits
    assert at_once.rows.tolist() == [0, 1, 2]
    assert at_once.blocks.tolist() == [6, 0, 6]
    for row in kept.tolist():
        assert at_once.probabilities[row] == pytest.approx(full[row][1], abs=1e-4)


@settings(max_examples=10, derandomize=True)
@given(st.integers(0, 99), st.floats(0.4, 1.0), st.sets(st.integers(1, 6), max_size=3))
def test_survivors_may_travel_between_any_two_splits(seed: int, threshold: float, cuts: set[int]) -> None:
    """Packed, sent on in parts, and joined with others, they get what they would have got alone."""
    names = ("bert", "roberta")
    model, inputs = cascade(names, threshold, [1.0, 0.6]), inputs_of(names, 4, seed)
    replica, ramps, result = SplitReplica(model), frozenset(model.ramp_blocks), dict[int, int]()
    whole = pack(model.merge(inputs))
    waiting = [(row, take(whole, np.array([row]))) for row in range(4)]
    for stop in [*sorted(cuts), model.num_blocks]:
        rows = [row for row, _ in waiting]
        for reply in replica.run(Order(stop, ramps, tuple(part for _, part in waiting))) if waiting else ():
            if isinstance(reply, Departed):
                result |= {rows[at]: block for at, block in zip(reply.exits.rows, reply.exits.blocks, strict=True)}
            elif reply.survivors is not None:
                here = reply.survivors
                waiting = [(rows[row], take(here, np.array([at]))) for at, row in enumerate(reply.rows)]
            else:
                waiting = []
    assert result == {
        row: by_hand(names, one, threshold, [1.0, 0.6], None, {*ramps})[0] for row, one in enumerate(inputs)
    }


def test_a_cascade_is_served_as_any_other_network() -> None:
    model = cascade(("bert", "roberta"), 0.5, [1.0, 1.0])
    assert isinstance(model, ServedModel)
    assert (model.num_blocks, model.num_labels, model.ramp_blocks) == (7, 3, (3,))
    assert (edges_of(model), label_names(model), reads_text(model)) == ((4,), ("a", "b", "c"), True)
    assert (model.backend, edges_of(network("bert"))) == ("torch", ())


@pytest.mark.parametrize(("stop", "ramps"), [(0, ()), (8, ()), (3, (0,))])
def test_what_a_cascade_does_not_have_is_refused(stop: int, ramps: tuple[int, ...]) -> None:
    model = cascade(("bert", "roberta"), 0.5, [1.0, 1.0])
    with pytest.raises(ValueError, match=r"stop|no ramp"):
        model.run(inputs_of(("bert", "roberta"), 1, seed=0)[0], stop, ramps)


def test_full_batches_warm_up_the_levels_that_a_split_runs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and ramps by each level's own numbers. The third level, which the split does not reach, is not run."""
    names = ("distilbert", "bert", "electra")
    model, ran = cascade(names, 0.5, (1.0, 0.5, 0.5), inner=0.5), list[tuple[object, ...]]()
    run = TorchModel.run

    def noted(network: TorchModel, batch: Batch, stop: int, ramps: Collection[int], *others: Any) -> Launched:
        ran.append((network.num_blocks, batch.cursor, stop, sorted(ramps), len(batch)))
        return run(network, batch, stop, ramps, *others)

    monkeypatch.setattr(TorchModel, "run", noted)
    batch = model.merge(inputs_of(names, 3, seed=0))
    model.warm_up(3, [5, 7], [4, 6], batch)
    assert ran == [(5, 3, 5, [], 3), (4, 0, 2, [1], 3)]
