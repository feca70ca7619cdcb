"""Tiny, randomly initialised networks of every family, with random ramps: real code paths, no download."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from isobatch.deployments.models.encode import Encoded
from isobatch.deployments.models.families import family_of
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps, make_head
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.model import Batch

DISTINCT = ("bert", "roberta", "electra", "distilbert", "albert", "mpnet", "modernbert", "deberta-v3", "gpt2")
TEXT = (*DISTINCT, "xlm-roberta", "camembert")  # these two are RoBERTa under other names
HEADS = ("modernbert-mean",)  # other heads of one of these: blocks are the same
PATCHES = ("vit", "deit", "deit-distilled", "beit", "swin")  # of images of 8 x 8, with one channel
IMAGE = (*PATCHES, "resnet", "resnet-bottleneck", "convnext", "convnextv2", "segformer")
FAMILIES = TEXT + IMAGE
DISTINCT_FAMILIES = DISTINCT + IMAGE
NUM_LABELS = 3
VOCABULARY = 40
WIDE = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
SEGFORMER = {
    "num_encoder_blocks": 3, "hidden_sizes": [8, 12, 16], "depths": [2, 1, 2], "num_attention_heads": [1, 2, 2],
    "sr_ratios": [4, 2, 1], "patch_sizes": [7, 3, 3], "strides": [4, 2, 2], "mlp_ratios": [2, 2, 2],
    "decoder_hidden_size": 16, "num_labels": NUM_LABELS, "image_size": [32, 32],
}  # fmt: skip


def _config(name: str) -> Any:
    return _text_config(name) if name in TEXT + HEADS else _image_config(name)


def _text_config(name: str) -> Any:
    import transformers

    text = {"vocab_size": VOCABULARY, "num_labels": NUM_LABELS, "pad_token_id": 1, "max_position_embeddings": 24}
    match name:
        case "bert":
            return transformers.BertConfig(num_hidden_layers=4, **text, **WIDE)
        case "roberta" | "xlm-roberta" | "camembert":
            kinds = {"roberta": transformers.RobertaConfig, "xlm-roberta": transformers.XLMRobertaConfig}
            kind = kinds.get(name, transformers.CamembertConfig)
            return kind(num_hidden_layers=3, type_vocab_size=1, **text, **WIDE)
        case "electra":
            return transformers.ElectraConfig(num_hidden_layers=3, embedding_size=8, **text, **WIDE)
        case "distilbert":
            return transformers.DistilBertConfig(n_layers=5, dim=16, n_heads=2, hidden_dim=24, **text)
        case "albert":
            groups = {"num_hidden_groups": 2, "embedding_size": 8, "classifier_dropout_prob": 0.0}
            return transformers.AlbertConfig(num_hidden_layers=4, **groups, **text, **WIDE)
        case "mpnet":
            return transformers.MPNetConfig(num_hidden_layers=3, **text, **WIDE)
        case "modernbert" | "modernbert-mean":
            pooled = {"classifier_pooling": "mean" if name.endswith("mean") else "cls", "global_attn_every_n_layers": 2}
            return transformers.ModernBertConfig(num_hidden_layers=3, local_attention=6, **pooled, **text, **WIDE)
        case "gpt2":
            return transformers.GPT2Config(n_layer=3, n_embd=16, n_head=4, **{**text, "n_positions": 24})
        case "deberta-v3":
            like_v3 = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
            places = {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
            fields = {**like_v3, **places, "type_vocab_size": 0}
            return transformers.DebertaV2Config(num_hidden_layers=3, **fields, **text, **WIDE)
    raise ValueError(name)


def _image_config(name: str) -> Any:
    import transformers

    small = {"image_size": 8, "num_channels": 1, "num_labels": NUM_LABELS}
    stages = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": NUM_LABELS}
    match name:
        case "vit":
            return transformers.ViTConfig(num_hidden_layers=4, patch_size=4, **small, **WIDE)
        case "deit" | "deit-distilled":
            kinds = ["DeiTForImageClassification" + ("WithTeacher" if name.endswith("distilled") else "")]
            return transformers.DeiTConfig(num_hidden_layers=4, patch_size=4, architectures=kinds, **small, **WIDE)
        case "beit":
            bias = {"use_relative_position_bias": True, "layer_scale_init_value": 0.5}
            return transformers.BeitConfig(num_hidden_layers=4, patch_size=4, **bias, **small, **WIDE)
        case "swin":
            shape = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2}
            return transformers.SwinConfig(patch_size=1, **shape, **small)
        case "convnext":
            return transformers.ConvNextConfig(num_stages=2, layer_scale_init_value=0.5, **stages)
        case "segformer":
            return transformers.SegformerConfig(**SEGFORMER)
        case "convnextv2":
            return transformers.ConvNextV2Config(num_stages=2, **stages)
        case "resnet" | "resnet-bottleneck":
            layer = "bottleneck" if name.endswith("bottleneck") else "basic"
            return transformers.ResNetConfig(embedding_size=8, layer_type=layer, **stages)
    raise ValueError(name)


@cache
def hugging_face(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The reference: Hugging Face's own model."""
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    torch.manual_seed(len(name))
    auto = AutoModelForSequenceClassification if name in TEXT + HEADS else AutoModelForImageClassification
    model = auto.from_config(_config(name)).eval()
    with torch.no_grad():  # larger weights than at initialisation, so that inputs give different logits
        for parameter in model.parameters():
            if parameter.ndim in (2, 3):  # a convolution's are large enough
                parameter.mul_(4.0)
    return model.to(dtype)


def network(name: str, policy: str | None = None, thresholds: Sequence[float] = (), dtype: Any = None) -> TorchModel:
    """The same weights, cut into blocks; with a policy, a random ramp stands after every block but the last."""
    model = hugging_face(name, dtype or torch.float32)
    anatomy = family_of(model.config.model_type).dissect(model)
    ramps = _random_ramps(name, policy, thresholds) if policy else Ramps()
    return TorchModel(anatomy, NoEncoder(), ramps, ["a", "b", "c"], torch.device("cpu"), dtype or torch.float32)


@cache
def _random_heads(name: str) -> dict[int, torch.nn.Module]:
    """Random heads, scaled so that ramps are more certain of some inputs than of others."""
    model = network(name)
    features, _ = model.features(model.merge(random_inputs(name, count=64, seed=11)))
    torch.manual_seed(7)
    heads = {}
    for block, pooled in enumerate(features):
        head = make_head("light", pooled.shape[1], NUM_LABELS)
        with torch.inference_mode():
            raw = head(pooled)
            scale = 2.0 / raw.std(dim=0)
            state = {"weight": head.weight * scale[:, None], "bias": (head.bias - raw.mean(dim=0)) * scale}
        head.load_state_dict(state)
        heads[block] = head.eval()
    return heads


def _random_ramps(name: str, policy: str, thresholds: Sequence[float]) -> Ramps:
    heads = _random_heads(name)
    rules = [
        RampRule(block=block, threshold=thresholds[block % len(thresholds)], temperature=1.0 + 0.1 * block)
        for block in heads
    ]
    return Ramps(ExitRules(policy=f"isobatch.deployments.exits:{policy}", ramps=tuple(rules)), heads)


class NoEncoder:
    """The tests of these networks make their batches themselves."""

    def __init__(self, longest: int | None = None) -> None:
        self.longest = longest

    def __call__(self, inputs: Sequence[Any]) -> Encoded:
        raise AssertionError("nothing is encoded here")


def random_inputs(name: str, count: int, seed: int, padded: bool = True) -> list[Batch]:
    """`count` batches of one input each."""
    random = np.random.default_rng(seed)
    model = network(name)
    return [_one_input(model, name, random, int(random.integers(2, 12)) if padded else 9) for _ in range(count)]


def _one_input(model: TorchModel, name: str, random: np.random.Generator, length: int) -> Batch:
    memory = np.zeros((1, 0), np.float32)
    if name in TEXT + HEADS:
        ids = random.integers(2, VOCABULARY, length)
        return Batch(0, {"input_ids": ids}, memory, np.array([length]))
    size = (1, 1, 8, 8) if name in PATCHES else (1, 3, 32, 32)
    return Batch(0, {"pixel_values": random.normal(size=size).astype(np.float32)}, memory)


def with_memory(batch: Batch, model: TorchModel) -> Batch:
    width = model.ramps.memory_width(model.num_labels)
    return Batch(batch.cursor, batch.arrays, np.zeros((len(batch), width), np.float32), batch.lengths)


@torch.inference_mode()
def reference_logits(name: str, batch: Batch, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The logits of Hugging Face's own forward pass."""
    arrays = {key: torch.as_tensor(value) for key, value in batch.arrays.items()}
    if batch.lengths is not None:
        arrays = padded(arrays["input_ids"], batch.lengths)
    if "pixel_values" in arrays:
        arrays["pixel_values"] = arrays["pixel_values"].to(dtype)
    return hugging_face(name, dtype)(**arrays).logits.float().numpy()


def padded(ids: torch.Tensor, lengths: np.ndarray) -> dict[str, torch.Tensor]:
    """The texts of a packed batch as Hugging Face wants them, side by side."""
    present = torch.arange(int(lengths.max())) < torch.as_tensor(lengths)[:, None]
    side_by_side = torch.ones(present.shape, dtype=torch.int64)
    side_by_side[present] = ids
    return {"input_ids": side_by_side, "attention_mask": present.long()}
