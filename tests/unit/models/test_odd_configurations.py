"""Networks whose configuration is rare: they give Hugging Face's own answers, or are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from isobatch.deployments.models.families import family_of
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Batch
from tests.helpers.tiny_networks import NoEncoder, padded

TINY = {"vocab_size": 40, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
RELATIVE = {"relative_attention": True, "position_buckets": 4}


def cut(model: Any) -> TorchModel:
    torch.manual_seed(0)
    for parameter in model.eval().parameters():
        parameter.data.normal_(0.0, 0.5)
    anatomy = family_of(model.config.model_type).dissect(model)
    return TorchModel(anatomy, NoEncoder(), Ramps(), ["a", "b"], torch.device("cpu"), torch.float32)


def assert_as_uncut(model: Any, batch: Batch, arrays: dict[str, torch.Tensor]) -> None:
    network = cut(model)
    with torch.inference_mode():
        expected = model(**arrays).logits.numpy()
    actual = network.run(batch, network.num_blocks, ()).exits.logits
    assert np.abs(actual - expected).max() < 1e-4


@pytest.mark.parametrize("kinds", [["c2p"], ["p2c", "c2p", "p2p"], []])
def test_deberta_with_any_kinds_of_relative_attention(kinds: list[str]) -> None:
    config = transformers.DebertaV2Config(**TINY, **RELATIVE, pos_att_type=kinds)
    ids, lengths = np.arange(2, 14), np.array([7, 5])
    batch = Batch(0, {"input_ids": ids}, np.zeros((2, 0), np.float32), lengths)
    assert_as_uncut(transformers.DebertaV2ForSequenceClassification(config), batch, padded(torch.tensor(ids), lengths))


@pytest.mark.parametrize("name", ["Roberta", "MPNet"])
def test_a_padding_token_that_is_a_part_of_a_text_takes_no_position(name: str, cache: Path) -> None:
    """As in transformers, where tokens after <pad> have the positions that they would have without it."""
    model = getattr(transformers, f"{name}ForSequenceClassification")(getattr(transformers, f"{name}Config")(**TINY))
    ids, lengths = np.array([5, 1, 1, 7, 8, 1, 9, 4, 6]), np.array([5, 4])
    batch = Batch(0, {"input_ids": ids}, np.zeros((2, 0), np.float32), lengths)
    assert_as_uncut(model, batch, padded(torch.tensor(ids), lengths))
    network = cut(model)
    exported = OnnxModel(network, f"{name}, padded", cache=cache)
    exported.prepare([BlockRange(0, 2)], batch)
    logits = [each.run(batch, 2, ()).exits.logits for each in (network, exported)]
    assert np.abs(logits[0] - logits[1]).max() < 1e-4


def test_layers_in_chunks_take_launches_of_any_number_of_tokens() -> None:
    config = transformers.BertConfig(**TINY, chunk_size_feed_forward=4)
    ids, lengths = np.arange(2, 15), np.array([8, 5])
    batch = Batch(0, {"input_ids": ids}, np.zeros((2, 0), np.float32), lengths)
    model = transformers.BertForSequenceClassification(config)
    assert_as_uncut(model, batch, padded(torch.tensor(ids), lengths))


def test_a_text_encoder_that_is_a_decoder_is_refused() -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, is_decoder=True))
    with pytest.raises(UserError, match="is_decoder"):
        cut(model)


@pytest.mark.parametrize("name", ["Bert", "Electra", "Roberta", "Albert"])
def test_an_encoder_of_relative_positions_is_refused(name: str) -> None:
    """Transformers ignores that it has them, and answers wrong."""
    config = getattr(transformers, f"{name}Config")(**TINY, position_embedding_type="relative_key")
    with pytest.raises(UserError, match="position_embedding_type is relative_key"):
        cut(getattr(transformers, f"{name}ForSequenceClassification")(config))


def test_mpnet_with_fewer_buckets_of_distances_than_transformers_reads_is_refused() -> None:
    model = transformers.MPNetForSequenceClassification(
        transformers.MPNetConfig(**TINY, relative_attention_num_buckets=8)
    )
    with pytest.raises(UserError, match="relative_attention_num_buckets is 8: transformers reads 32"):
        cut(model)


def test_swin_with_images_that_do_not_consist_of_whole_patches() -> None:
    shape = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    config = transformers.SwinConfig(image_size=30, patch_size=4, num_channels=1, **shape)
    pixels = torch.rand(2, 1, 30, 30)
    batch = Batch(0, {"pixel_values": pixels.numpy()}, np.zeros((2, 0), np.float32))
    assert_as_uncut(transformers.SwinForImageClassification(config), batch, {"pixel_values": pixels})
