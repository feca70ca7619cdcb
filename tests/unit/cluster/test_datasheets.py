"""Shapes from configs: those of well-known networks must come out as they were written down by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from experiments.planner.networks import bert_base, distilbert, resnet50, vit_base
from isobatch.cluster.profiling.datasheets import shape_of, tables
from isobatch.profiles.errors import UserError
from tests.helpers.tiny_networks import FAMILIES, TEXT, hugging_face, network


def test_configs_of_well_known_networks_give_their_shapes() -> None:
    assert shape_of(transformers.BertConfig(), 64).blocks == bert_base(64).blocks
    assert shape_of(transformers.DistilBertConfig(), 64).blocks == distilbert(64).blocks
    assert shape_of(transformers.ViTConfig(num_labels=1000), None).blocks == vit_base().blocks
    assert shape_of(transformers.ResNetConfig(num_labels=1000), None).blocks == resnet50().blocks


STAGED = ("swin", "convnext", "convnextv2", "segformer")


@pytest.mark.parametrize("name", STAGED)
def test_families_in_stages_are_told_to_be_measured(name: str) -> None:
    with pytest.raises(UserError, match=r"its stages differ.*: measure it"):
        shape_of(hugging_face(name).config, None, 8)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in STAGED])
def test_every_family_has_a_table_with_as_many_blocks_as_it_can_be_cut_into(name: str) -> None:
    config, length = hugging_face(name).config, 12 if name in TEXT else None
    for table in tables(config, ["k80", "cpu"], [length], 32, ramps=[0]):
        assert table.num_blocks == network(name).num_blocks
        assert table.length == length
        assert table.derived
        assert all(row[0] > 0 and not any(row[1:]) for row in table.ramp_s)  # a ramp where the network has one


def test_layers_that_run_again_are_held_once() -> None:
    config = hugging_face("albert").config
    table, *_ = tables(config, ["k80"], [12], 0, ramps=[])
    layer = table.memory_bytes[1]
    assert table.repeated_bytes == (0, layer, 0, layer), "two layers, each of which runs twice"


def test_a_network_that_no_shape_fits_is_told_to_be_measured() -> None:
    config: Any = SimpleNamespace(model_type="toy", width=64)
    with pytest.raises(UserError, match=r"for model type 'toy'.*: measure it"):
        shape_of(config, None)
    assert not list(tables(config, [], [None], 224, ()))  # but only where one is asked for
