"""Makes untrained networks with the shapes of well-known ones, since time does not depend on the weights."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from isobatch.deployments.models.encode import Encoded
from isobatch.deployments.models.families import family_of
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Batch

LABELS = 2
SIDE = 224
NAMES = ("bert-base", "bert-large", "distilbert", "vit-base", "resnet-50")


def config(name: str, layers: int | None = None) -> Any:
    """Hugging Face's own configuration; `layers`: fewer layers and few words, for a trial."""
    import transformers

    few = {} if layers is None else {"vocab_size": 1000}
    depth = {} if layers is None else {"num_hidden_layers": layers}
    match name:
        case "bert-base":
            return transformers.BertConfig(num_labels=LABELS, **depth, **few)
        case "bert-large":
            large = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
            return transformers.BertConfig(num_labels=LABELS, **(large | depth), **few)
        case "distilbert":
            return transformers.DistilBertConfig(
                num_labels=LABELS, **({} if layers is None else {"n_layers": layers}), **few
            )
        case "vit-base":
            return transformers.ViTConfig(num_labels=LABELS, **depth)
        case "resnet-50":
            depths = [3, 4, 6, 3] if layers is None else [1] * 4
            return transformers.ResNetConfig(num_labels=LABELS, depths=depths)
    raise UserError(f"{name!r} is none of {', '.join(NAMES)}")


def untrained(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, layers: int | None = None
) -> TorchModel:
    """A network of this shape, without ramps and without a tokenizer: `batches` makes what it reads."""
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    shape = config(name, layers)
    family = family_of(shape.model_type)
    torch.manual_seed(0)
    if family.reads == "text":
        model = AutoModelForSequenceClassification.from_config(shape)
    else:
        model = AutoModelForImageClassification.from_config(shape)
    model = model.to(device=device, dtype=dtype).eval()
    place = torch.device(device)
    return TorchModel(family.dissect(model), NoEncoder(), Ramps(), [str(k) for k in range(LABELS)], place, dtype)


@contextmanager
def own_cache() -> Iterator[None]:
    """Keep ONNX graphs in a temporary cache, since graphs of untrained networks have no use afterwards."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        yield


def batches(name: str, length: int, words: int = 1000) -> Callable[[int], Batch]:
    """Batches of any size: random tokens of one length, or random pictures."""
    random = np.random.default_rng(0)
    shape = config(name)

    def of(size: int) -> Batch:
        memory = np.zeros((size, 0), np.float32)
        if family_of(shape.model_type).reads == "text":
            tokens = random.integers(5, words, size * length)
            return Batch(0, {"input_ids": tokens}, memory, np.full(size, length))
        pixels = random.normal(size=(size, 3, SIDE, SIDE)).astype(np.float32)
        return Batch(0, {"pixel_values": pixels}, memory)

    return of


class NoEncoder:
    longest = None

    def __call__(self, inputs: object) -> Encoded:
        raise TypeError("an untrained network reads what `batches` makes, and nothing else")
