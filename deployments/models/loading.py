"""From a checkpoint (a directory or a hub id) to a network that can be cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deployments.models.anatomy import Anatomy, Family
from deployments.models.encode import Encoder, ImageEncoder, TextEncoder
from deployments.models.families import family_of
from deployments.models.ramps import RULES, WEIGHTS, Ramps, read_ramps
from deployments.models.torch_model import TorchModel
from profiles.errors import UserError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(
    checkpoint: str | Path, device: str = "cpu", dtype: str = "float32", family: Family | None = None
) -> TorchModel:
    """A network from a local directory or a hub id, with its ramps if `isobatch prepare` has made some.

    `family` overrides the one found by the checkpoint's `model_type`: bring your own with one small object.
    """
    from transformers import AutoConfig

    with _one_line_errors(checkpoint):
        config = AutoConfig.from_pretrained(checkpoint)
    family = family or family_of(config.model_type)
    model = _read_classifier(checkpoint, family, resolve_dtype(dtype)).to(resolve_device(device)).eval()
    anatomy = family.dissect(model)
    return TorchModel(
        anatomy,
        _read_encoder(checkpoint, family, config),
        _read_ramps(checkpoint, anatomy, config.num_labels, model.device),
        [config.id2label[index] for index in range(config.num_labels)],
        model.device,
        model.dtype,
    )


def resolve_device(name: str) -> torch.device:
    """
    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name!r} is not known; use auto, cpu or cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not on this machine, which has {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _read_classifier(checkpoint: str | Path, family: Family, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    loader = AutoModelForSequenceClassification if family.task == "text" else AutoModelForImageClassification
    with _one_line_errors(checkpoint):
        model, report = loader.from_pretrained(checkpoint, dtype=dtype, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{checkpoint}: has no trained classifier: {', '.join(missing[:3])} missing; fine-tune it first"
        )
    if model.config.num_labels < 2:
        raise UserError(f"{checkpoint}: is no classifier: num_labels = {model.config.num_labels}, at least 2 needed")
    return model


def _read_encoder(checkpoint: str | Path, family: Family, config: Any) -> Encoder:
    from transformers import AutoImageProcessor, AutoTokenizer

    with _one_line_errors(checkpoint):
        if family.task == "image":
            processor = AutoImageProcessor.from_pretrained(checkpoint)
            return ImageEncoder(processor, config.num_channels, _image_size(config))
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="right")
    return TextEncoder(tokenizer, min(tokenizer.model_max_length, _positions(config)))


def _image_size(config: Any) -> tuple[int, int] | None:
    """A vision transformer has positions for one size only; a convolutional network takes any."""
    size = getattr(config, "image_size", None)
    return (size, size) if isinstance(size, int) else (tuple(size) if size else None)


def _positions(config: Any) -> int:
    """RoBERTa numbers its positions from behind the padding token's id, so fewer are left."""
    offset = config.pad_token_id + 1 if "roberta" in config.model_type else 0
    return int(config.max_position_embeddings - offset)


def _read_ramps(checkpoint: str | Path, anatomy: Anatomy, num_labels: int, device: torch.device) -> Ramps:
    from transformers.utils import cached_file

    found = [
        cached_file(str(checkpoint), name, _raise_exceptions_for_missing_entries=False) for name in (RULES, WEIGHTS)
    ]
    if found[0] is None or found[1] is None:
        return Ramps()
    ramps = read_ramps(Path(found[0]), Path(found[1]), anatomy.pooled_widths, num_labels)
    for head in ramps.heads.values():
        head.to(device)
    return ramps


@contextmanager
def _one_line_errors(checkpoint: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{checkpoint}: cannot be read as a checkpoint: {reason}") from error
