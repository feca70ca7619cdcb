"""A SegFormer that labels pixels, cut anywhere: its maps are those of transformers, and pixels leave together."""

from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.class_maps import class_map, labels_of_runs, runs_of
from isobatch.deployments.models import TorchModel, load
from isobatch.deployments.models.checkpoint import task_at
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps
from isobatch.deployments.models.regions import Regions, packed
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.orders import Departed, Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.errors import UserError
from tests.helpers.backend_parity import assert_same, run_in_splits
from tests.helpers.tiny_pixels import (
    GRID,
    NAMES,
    SIDE,
    beit,
    drawn,
    hugging_face,
    pixel_network,
    reference_logits,
    rows_of,
    upernet,
)

PICTURES = drawn(5, seed=9).pictures
BACKBONES = ("convnext", "resnet", "swin")


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return load(pixel_network())


@pytest.mark.parametrize(
    "network",
    [pixel_network, *(partial(upernet, over) for over in BACKBONES), *(partial(beit, each) for each in (False, True))],
)
def test_every_pair_of_cuts_equals_the_uncut_network(network: Callable[[], Path]) -> None:
    """The head of BEiT does not read its seventh layer. Transformers gives UperNet's maps as large as the picture."""
    model, expected = load(network()), reference_logits(PICTURES, network())
    assert (model.num_blocks, model.task.parts(11)) == (6, GRID**2)
    for count in (0, 1, 2):
        for cuts in combinations(range(1, 6), count):
            exits = run_in_splits(model, model.encode(list(PICTURES)), cuts)
            assert exits.counts.tolist() == [GRID * GRID] * 5
            maps = torch.from_numpy(exits.logits).reshape(5, GRID, GRID, -1).permute(0, 3, 1, 2)
            if expected.shape[-1] == SIDE:
                maps = torch.nn.functional.interpolate(maps, (SIDE, SIDE), mode="bilinear", align_corners=False)
            assert float((maps - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("over", BACKBONES)
def test_bridges_of_upernet_begin_as_its_own_blocks(over: str) -> None:
    """Behind the block before the last region, whose only block the bridge has, they are the rest of the network."""
    model = load(upernet(over))
    pooled, logits = model.features(model.encode(list(PICTURES)))
    with torch.inference_mode():
        assert torch.allclose(model.anatomy.bridge(4).eval()(pooled[4]), logits, atol=1e-5)
        assert model.anatomy.bridge(0).eval()(pooled[0]).shape == logits.shape


@pytest.mark.parametrize("shared", [False, True])
def test_bridges_of_beit_begin_as_its_own_layers(shared: bool) -> None:
    model = load(beit(shared))
    pooled, _ = model.features(model.encode(list(PICTURES)))
    layers = hugging_face(beit(shared)).beit.layers
    for block, firsts in enumerate([(1, 2, 4), (2, 4), (4,), (4,), ()]):
        bridge = model.anatomy.bridge(block).eval()
        with torch.inference_mode():
            assert bridge(pooled[block]).shape == (5 * GRID**2, len(NAMES))
        for stage, first in zip(bridge.stages, firsts, strict=True):
            own = stage.layer.state_dict()
            assert all(torch.equal(own[name], each) for name, each in layers[first].state_dict().items())


def test_survivors_are_rows_that_merge_and_part(model: TorchModel) -> None:
    one, others = model.encode(list(PICTURES[:1])), model.encode(list(PICTURES[1:]))
    parts = [model.run(each, 3, ()).survivors for each in (one, others)]
    assert all(part.arrays["hidden"].ndim == 2 for part in parts)
    merged = model.select(model.merge(parts), np.array([4, 0]))
    exits = model.run(merged, 6, ()).exits
    expected = reference_logits(PICTURES)[[4, 0]]
    assert np.abs(exits.logits - rows_of(expected).numpy()).max() < 1e-5


@pytest.mark.parametrize("size", [(GRID, GRID), (32, 32), (40, 23), (7, 100), (1, 1)])
def test_maps_of_any_size_are_those_of_transformers(size: tuple[int, int]) -> None:
    logits = reference_logits(PICTURES[:1])
    grown = torch.nn.functional.interpolate(logits, size, mode="bilinear", align_corners=False)
    ours = class_map(logits[0].permute(1, 2, 0).numpy(), size)
    best = grown[0].topk(2, dim=0).values
    clear = (best[0] - best[1] > 1e-4).numpy()  # pixels between two labels may fall to either side
    assert ours.shape == size
    assert clear.mean() > 0.99
    assert (ours == grown[0].argmax(dim=0).numpy())[clear].all()


def test_a_picture_has_one_answer_of_all_its_pixels(model: TorchModel) -> None:
    labels = reference_logits(PICTURES).argmax(dim=1).flatten(1).numpy()
    for answer, expected in zip(model.predict(list(PICTURES)), labels, strict=True):
        assert answer.exit_block == 5
        assert (np.array(answer.label) == expected).all()
        assert answer.name == tuple(NAMES[label] for label in np.unique(expected))
        assert answer.probabilities.shape == (GRID * GRID, len(NAMES))
    order = Order(6, frozenset(), (pack(model.encode(list(PICTURES))),))
    (departed,) = [reply for reply in SplitReplica(model).run(order) if isinstance(reply, Departed)]
    assert [label for label, _ in departed.exits.answers()] == [tuple(row) for row in labels.tolist()]


def test_a_head_for_pixels_of_another_family_is_refused(tmp_path: Path) -> None:
    import transformers

    transformers.ConvNextConfig(architectures=["ConvNextForSemanticSegmentation"]).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match="convnext is not known with a head for pixels; known are: beit, segformer, upernet, vitpose"
    ):
        task_at(tmp_path)


def test_a_preprocessor_that_leaves_pictures_as_large_as_they_are_is_refused(tmp_path: Path) -> None:
    import transformers

    copytree(pixel_network(), tmp_path / "own")
    transformers.SegformerImageProcessorPil(do_resize=False).save_pretrained(tmp_path / "own")
    with pytest.raises(UserError, match="must bring images to one size: set do_resize, and height and width in size"):
        load(tmp_path / "own")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_runs_are_the_map_in_short(labels: list[int]) -> None:
    runs = runs_of(np.array(labels).reshape(1, -1))
    assert labels_of_runs(runs).tolist() == labels
    assert all(before[0] != after[0] for before, after in pairwise(runs))


@given(st.integers(0, 5), st.integers(1, 3), st.integers(0, 9))
def test_maps_are_packed_into_rows_and_back(block: int, count: int, seed: int) -> None:
    regions = Regions((4, 6, 8), ((8, 6), (4, 3), (2, 2)), (2, 1, 3), as_tokens=True)
    random = np.random.default_rng(seed)
    rows = torch.from_numpy(random.normal(size=(count, sum(regions.sizes(block)))))
    maps = regions.unpacked(rows, block)
    region, place = regions.places[block]
    assert len(maps) == region + 1
    assert [tuple(each.shape[1:]) for each in maps[:-1]] == [
        (regions.channels[each], *regions.sides[each]) for each in range(region)
    ]
    assert (maps[-1].ndim == 4) == (place == regions.depths[region] - 1)
    assert torch.equal(packed(maps), rows)


def test_onnx_runtime_gives_the_same_maps_and_bridges(model: TorchModel, cache: Path) -> None:
    heads = {block: model.anatomy.bridge(block).eval() for block in (0, 2, 4)}
    rules = [RampRule(block=block, threshold=0.3) for block in heads]
    policy = "isobatch.deployments.exits:confidence"
    exact = model.with_ramps(Ramps(ExitRules(kind="bridge", policy=policy, ramps=tuple(rules), most_unsure=9), heads))
    batch = exact.encode(list(PICTURES))
    served = OnnxModel(exact, "scenes", cache=cache)
    wanted = [BlockRange(0, 3, (0, 2)), BlockRange(3, 6, (4,)), BlockRange(0, 6)]
    served.prepare(wanted, batch)
    for ramps in ((), (0, 2, 4)):
        assert_same(exact.run(batch, 6, ramps), served.run(batch, 6, ramps))
    survivors = exact.run(batch, 3, ()).survivors
    assert_same(exact.run(survivors, 6, (4,)), served.run(survivors, 6, (4,)))
