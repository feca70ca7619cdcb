"""Loads a checkpoint (a directory or a hub id) as a network that can be cut."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from threading import Lock, get_ident, local
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.models.anatomy import Anatomy, Family, token_anatomy
from isobatch.deployments.models.checkpoint import (
    channels_in,
    check_head,
    check_preprocessor,
    fixed_size,
    locate,
    of_several_sizes,
    read_config,
    size_made,
    task_in,
)
from isobatch.deployments.models.encode import Encoder, ImageEncoder, TextEncoder, WordEncoder
from isobatch.deployments.models.families import check_knows_maps, family_of
from isobatch.deployments.models.levels import is_cascade
from isobatch.deployments.models.products import pack_when_used
from isobatch.deployments.models.ramps import WEIGHTS, Ramps, check_answers, check_forgets, read_ramps
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.named import known_device
from isobatch.deployments.resources import check_here
from isobatch.deployments.tasks import Task
from isobatch.profiles.errors import UserError, WrongInputError
from isobatch.profiles.promise import RULES

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load(
    checkpoint: str | Path, device: str = "cpu", dtype: str = "float32", family: Family | None = None
) -> TorchModel:
    """A network from a local directory or a hub id, with its ramps if `isobatch prepare` has made some.

    `family` replaces the family of the checkpoint's `model_type`, for architectures that isobatch does not know.
    """
    torch_device, precision = resolve_device(device), resolve_dtype(dtype)
    folder = locate(checkpoint)
    if is_cascade(folder):
        raise UserError(f"{folder}: is a cascade, made of several networks: give one of them")
    with quietly(), one_line_errors(folder):
        config = read_config(folder)
        family = family or family_of(config.model_type)
        check_preprocessor(folder, family.reads)
        check_head(folder, config)
        model = _read_network(folder, task_in(config), family, precision).eval()
        release = None if torch_device.type == "cpu" else move_when_used(model, torch_device)
        encoder = read_encoder(folder, family)
        if family.one_size and isinstance(encoder, ImageEncoder):
            model.config.image_size = encoder.size
    anatomy = anatomy_of_task(model, family, task_in(config))
    if torch_device.type == "cpu" and precision == torch.bfloat16 and not anatomy.task.by_map:
        pack_when_used(model)  # ONNX Runtime does not compute in it here, so nothing else reads these weights
    if release:
        anatomy = replace(anatomy, release=release)
    return TorchModel(
        anatomy,
        encoder,
        _read_ramps(folder, anatomy, config.num_labels, torch_device),
        [config.id2label[index] for index in range(config.num_labels)],
        torch_device,
        model.dtype,
    )


def resolve_device(name: str) -> torch.device:
    """
    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    check_here(known_device(name), torch.cuda.device_count)
    return torch.empty(0, device=name).device  # "cuda" becomes "cuda:0"


def resolve_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not known; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def anatomy_of_task(model: Any, family: Family, task: Task) -> Anatomy:
    check_knows_maps(task, family, model.config.model_type)
    anatomy = family.dissect(model)
    if task.by_map:
        return anatomy
    return token_anatomy(anatomy, model) if task.by_token else replace(anatomy, task=task)


def move_when_used(network: torch.nn.Module, device: torch.device) -> Callable[[], None]:
    """Move the weights of each module to the device when it first runs.

    Until then they are mapped from their file on the host. So a replica's device holds the weights of the blocks that
    the replica runs, as the plan expects. The returned function frees the device of all of them, until their next run.
    """
    moving = Lock()  # threads that compute at the same time share the weights
    moved = dict[torch.nn.Module, list[dict[str, Tensor | None]]]()  # what modules had on the host
    on_host = dict[Tensor, Tensor]()  # the data of each of these tensors: modules may share them

    def move(module: torch.nn.Module, _: Any) -> None:
        with moving, torch.inference_mode(False):
            moved.setdefault(module, [dict(module._parameters), dict(module._buffers)])
            for tensor in (each for tensors in moved[module] for each in tensors.values() if each is not None):
                on_host.setdefault(tensor, tensor.data)
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
            hooks[module].remove()

    def release() -> None:
        with moving, torch.inference_mode(False):
            for tensor, data in on_host.items():
                tensor.data = data
            for module, (parameters, buffers) in moved.items():
                module._parameters.update(parameters)  # type: ignore[arg-type]
                module._buffers.update(buffers)
                hooks[module] = module.register_forward_pre_hook(move)
            moved.clear()
            on_host.clear()

    hooks = {module: module.register_forward_pre_hook(move) for module in network.modules()}
    return release


def _read_network(folder: Path, task: Task, family: Family, dtype: torch.dtype) -> Any:
    import transformers

    loader = getattr(transformers, task.loaders[family.reads])
    model, report = loader.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for name, saved, wanted in sorted(report["mismatched_keys"]):
        sizes = f"{name} is {' x '.join(map(str, saved))} in its weights, {' x '.join(map(str, wanted))} by config.json"
        raise UserError(f"{folder}: {sizes}: correct config.json (id2label names the outputs of the head)")
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{folder}: has no trained classifier: {', '.join(missing[:3])} missing; fine-tune it first")
    return model


def read_encoder(folder: Path, family: Family | None = None) -> Encoder:
    """The checkpoint's preprocessor, without its weights."""
    from transformers import AutoImageProcessor, AutoTokenizer

    config = read_config(folder)
    family = family or family_of(config.model_type)
    if family.reads == "image":
        encoder = ImageEncoder(AutoImageProcessor.from_pretrained(folder, trust_remote_code=False), channels_in(config))
        if family.any_size:
            return replace(encoder, size=_size_of_all(encoder, folder))
        size = size_made(folder) if family.one_size else fixed_size(config)
        return replace(encoder, size=size, boxed=isinstance(task_in(config), Keypoints))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right", trust_remote_code=False)
    if (last := max(tokenizer.get_vocab().values())) >= config.vocab_size:
        beyond = f"its tokenizer has the token {last}, the network knows {config.vocab_size}"
        raise UserError(f"{folder}: {beyond}: save the tokenizer beside it with which it was trained")
    longest, types = min(tokenizer.model_max_length, _positions(config)), getattr(config, "type_vocab_size", 0)
    texts = TextEncoder(ThreadsOwn(tokenizer, get_ident()), longest, types > 1 or family.reads_types)
    if not task_in(config).by_token:
        return replace(texts, unread=config.pad_token_id) if family.reads_last else texts
    if not tokenizer.is_fast:
        raise UserError(f"{folder}: its tokenizer does not give the offsets of tokens: it needs a tokenizer.json")
    return WordEncoder(texts)


def _size_of_all(encoder: ImageEncoder, folder: Path) -> tuple[int, int]:
    """The height and width to which the preprocessor brings pictures: those of a launch have one size."""
    try:
        pixels = encoder([np.zeros((40, 30)), np.zeros((30, 40))]).arrays["pixel_values"]
    except WrongInputError as error:
        raise of_several_sizes(folder) from error
    return pixels.shape[-2], pixels.shape[-1]


class ThreadsOwn(local):
    """A tokenizer for several threads. Each but the `owner` gets a copy, since calls change its truncation."""

    def __init__(self, tokenizer: Any, owner: int) -> None:
        self._own = tokenizer if get_ident() == owner else deepcopy(tokenizer)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._own(*texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _positions(config: Any) -> int:
    """The number of usable positions. RoBERTa starts counting after the padding token's id, so it has fewer."""
    roberta = "roberta" in config.model_type or config.model_type in ("camembert", "mpnet")
    offset = (config.pad_token_id or 0) + 1 if roberta else 0
    return int(config.max_position_embeddings - offset)


def _read_ramps(folder: Path, anatomy: Anatomy, num_labels: int, device: torch.device) -> Ramps:
    if not (folder / RULES).exists():
        return Ramps()
    files, width = (folder / RULES, folder / WEIGHTS), anatomy.task.ramp_width(num_labels)
    ramps = read_ramps(*files, anatomy.pooled_widths, width, device, bridge=anatomy.bridge)
    check_answers(ramps.policy, folder / RULES, anatomy.task)
    if anatomy.task.several:
        check_forgets(ramps.policy, folder / RULES)
    for sentence in ramps.idle(anatomy.task.choices(num_labels)):
        log.info("%s: %s", folder / RULES, sentence)
    return ramps


@contextmanager
def quietly() -> Iterator[None]:
    """Hide Hugging Face's progress bars and warnings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def one_line_errors(folder: Path) -> Iterator[None]:
    """Name the folder in errors of Hugging Face's libraries, which raise whatever a wrong file leads to."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        kind = "" if isinstance(error, OSError | ValueError | SafetensorError) else f"{type(error).__name__}: "
        raise UserError(f"{folder}: cannot be read as a checkpoint: {kind}{reason}") from error
