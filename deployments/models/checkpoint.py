"""The files of a Hugging Face checkpoint: their names and contents, and a copy of those that cannot run code."""

import logging
import shutil
from collections.abc import Callable
from hashlib import file_digest, sha256
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isobatch.deployments.folders import PLAN, PROFILE, STEPS, checkpoint_json, is_decoder
from isobatch.deployments.map_tasks import TASKS
from isobatch.deployments.models.families import check_knows_maps, family_of
from isobatch.deployments.models.levels import is_cascade, last_of
from isobatch.deployments.models.ramps import WEIGHTS
from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.named import Dtype
from isobatch.deployments.precision import HALVES, own_dtype, own_precisions
from isobatch.deployments.sources import SAFE_SUFFIXES, as_url, local
from isobatch.deployments.tasks import (
    A_NUMBER,
    CLASSIFICATION,
    LABELS,
    REGRESSION,
    SCORING,
    SEVERAL_LABELS,
    Task,
    check_problem,
)
from isobatch.profiles.errors import UserError
from isobatch.profiles.lengths import AROUND, WORD
from isobatch.profiles.model import Batch
from isobatch.profiles.promise import RULES

log = logging.getLogger(__name__)

# Pixels: the side of images for networks that take any size, as most were trained on ImageNet at 224 x 224.
USUAL_SIDE = 224
WORDS = 32  # words of a made-up text, unless its length is given
# Files with a tokenizer's vocabulary. Without any of them Hugging Face makes a tokenizer that knows no word at all.
SENTENCEPIECE = "*.model"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", SENTENCEPIECE)
PROCESSOR = "preprocessor_config.json"  # the file that describes an image processor
MADE = (RULES, WEIGHTS, PLAN, PROFILE, STEPS)  # files that isobatch adds to a checkpoint


def check_if_classifier(folder: Path) -> None:
    if is_decoder(folder):
        raise UserError(
            f"{folder}: is a decoder, which writes texts, not a classifier: isobatch prepare, profile, plan and serve "
            "take it"
        )


def locate(checkpoint: str | Path, check_config: Callable[[Path], None] = check_if_classifier) -> Path:
    """The directory of a checkpoint: a local one, a built-in one by name, or a download by hub id or URL.

    `check_config` may refuse its config before anything is said about its weights.
    """
    folder = local(as_url(checkpoint) if isinstance(checkpoint, str) else checkpoint)
    if not folder.is_dir():
        problem = "is a file; give the directory of a checkpoint" if folder.is_file() else "no such directory"
        raise UserError(f"{checkpoint}: {problem}")
    if is_cascade(folder):
        return folder
    if not (folder / "config.json").is_file():
        raise UserError(f"{checkpoint}: is not a checkpoint: it has no config.json")
    check_config(folder)
    if not any(path.is_file() and path.name != WEIGHTS for path in folder.glob("*.safetensors")):
        raise UserError(f"{checkpoint}: has no *.safetensors weights; save it with save_pretrained() first")
    check_index(folder)
    return folder


def check_index(folder: Path) -> None:
    """Raise UserError if the index of the weights names a file that is not in the directory."""
    for index in folder.glob("*.safetensors.index.json"):
        names = checkpoint_json(folder, index.name).get("weight_map")
        for name in names.values() if isinstance(names, dict) else [names]:
            if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{index}: weight_map names {name!r}, which is not a file of this directory")


def check(folder: Path) -> None:
    """Raise UserError if the checkpoint lacks its preprocessor, or has a head that we do not serve."""
    if is_cascade(folder):
        raise UserError(f"{folder}: is a cascade, made of several networks: give one of them")
    config = read_config(folder)
    check_preprocessor(folder, family_of(config.model_type).reads)
    check_head(folder, config)


def check_level(folder: Path) -> None:
    """Raise UserError if the checkpoint cannot be a level of a cascade."""
    check(folder)
    if (task := task_at(folder)) is not CLASSIFICATION:
        several = "gives an input several labels" if task.by_label else "gives an input a score"
        other = f"labels {task.answered}" if task.by_token or task.by_map else several
        raise UserError(f"{folder}: {other}: a cascade is made of networks that give one label to each input")


def check_preprocessor(folder: Path, reads: str) -> None:
    if reads == "image" and not (folder / PROCESSOR).is_file():
        raise UserError(f"{folder}: has no {PROCESSOR}: save the image processor there with save_pretrained()")
    vocabularies = [name for name in VOCABULARIES if any(folder.glob(name))]
    if reads == "text" and not vocabularies:
        raise UserError(
            f"{folder}: has no tokenizer ({', '.join(VOCABULARIES)}): save it there with tokenizer.save_pretrained()"
        )
    if vocabularies == [SENTENCEPIECE] and not find_spec("sentencepiece"):
        needed = "pip install sentencepiece, or save a tokenizer.json there"
        raise UserError(f"{folder}: its tokenizer is a SentencePiece model: {needed}")


def check_head(folder: Path, config: Any) -> None:
    check_problem(folder, getattr(config, "problem_type", None), config.num_labels)
    if config.num_labels < 1:
        raise UserError(f"{folder}: is not a classifier: num_labels = {config.num_labels}")
    numbers = sorted(config.id2label)
    if numbers != list(range(config.num_labels)):
        listed = ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
        last = config.num_labels - 1
        raise UserError(
            f"{folder}: id2label numbers its {len(numbers)} labels {listed}, not 0 to {last}: correct config.json"
        )


def files(folder: Path) -> list[Path]:
    """The checkpoint's own files: nothing pickled, no hidden file, no ramps of an earlier preparation, no plan."""
    safe = (path for path in folder.iterdir() if path.is_file() and path.suffix in SAFE_SUFFIXES)
    return sorted(path for path in safe if not path.name.startswith(".") and path.name not in MADE)


def fingerprint(folder: Path) -> str:
    """A hash of the names and contents of the checkpoint's files."""
    digest = sha256()
    for path in files(folder):
        with path.open("rb") as file:
            digest.update(path.name.encode())
            file_digest(file, lambda: digest)
    return digest.hexdigest()


def reads_images(folder: Path) -> bool:
    """Whether the network in this directory takes images instead of texts."""
    return family_of(read_config(last_of(folder)).model_type).reads == "image"


def channels_of(folder: Path) -> int | None:
    """The number of channels of the network's images; None for a network that takes texts."""
    return image_size(folder)[1] if reads_images(folder) else None


def image_size(folder: Path) -> tuple[int, int]:
    """The side of a square with as many pixels as the images of this network, and their number of channels."""
    height, width, channels = _usual_image(folder)
    return round(sqrt(height * width)), channels


def _usual_image(folder: Path) -> tuple[int, int, int]:
    config = read_config(last_of(folder))
    return *(fixed_size(config) or (USUAL_SIDE, USUAL_SIDE)), channels_in(config)


def channels_in(config: Any) -> int:
    """The number of channels of images; that of the backbone where a head has a configuration of its own."""
    channels: int = getattr(config, "num_channels", None) or config.backbone_config.num_channels
    return channels


def fixed_size(config: Any) -> tuple[int, int] | None:
    """Height and width of images in the configuration; None if it has neither."""
    size = getattr(config, "image_size", None) or getattr(getattr(config, "backbone_config", None), "image_size", None)
    return (size, size) if isinstance(size, int) else (tuple(size) if size else None)


def task_in(config: Any) -> Task:
    """The task of a network, by the names of its architecture and its problem in its configuration."""
    architecture, problem = (getattr(config, "architectures", None) or [""])[0], getattr(config, "problem_type", None)
    whole = LABELS if problem == SEVERAL_LABELS else CLASSIFICATION
    if config.num_labels == 1 and whole is CLASSIFICATION:
        whole = REGRESSION if problem == A_NUMBER else SCORING
    return next((task for task in TASKS if task.heads and architecture.endswith(task.heads)), whole)


def task_at(folder: Path) -> Task:
    config = read_config(last_of(folder))
    task, family = task_in(config), family_of(config.model_type)
    check_knows_maps(task, family, config.model_type)
    if not (task.by_map and family.map_task):
        return task
    if family.one_size:
        config.image_size = size_made(folder)
    return family.map_task(config)


def size_made(folder: Path) -> tuple[int, int]:
    """The height and width to which the preprocessor brings every image."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    height, width = (getattr(processor.size, side, None) for side in ("height", "width"))
    if not (processor.do_resize and height and width):
        raise of_several_sizes(folder)
    return height, width


def of_several_sizes(folder: Path) -> UserError:
    return UserError(
        f"{folder}: its {PROCESSOR} must bring images to one size: set do_resize, and height and width in size"
    )


def label_names(folder: Path) -> list[str]:
    names: dict[int, str] = read_config(last_of(folder)).id2label
    return [names[number] for number in sorted(names)]


def reduces_labels(folder: Path) -> bool:
    """Whether the preprocessor takes 0 in a map of labels for no label, and counts the head's labels from 1."""
    settings = checkpoint_json(folder, PROCESSOR)
    return bool(settings.get("do_reduce_labels", settings.get("reduce_labels")))  # the older name


def read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        # Otherwise the library asks whether to run a checkpoint's own code, and waits for an answer.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.id2label:  # its names may be numbers or null
            config.id2label = {number: str(name) for number, name in config.id2label.items()}
        return config
    except Exception as error:  # the library raises whatever a wrong value leads to, such as errors of types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = " ".join(line.strip() for line in lines[: 1 if isinstance(error, OSError | ValueError) else 2])
        raise UserError(f"{folder}: its config.json cannot be read: {reason}") from error


def usual_dtype(folder: Path, device: torch.device) -> Dtype:
    """The precision of a classifier if the user names none: that of its ramps; without ramps, float32 on a CPU, and on
    a GPU that of the weights' file, or float32 if the GPU is slow in that. For a GPU, the log says which one it is.
    """
    if device.type == "cpu":
        return own_precisions(folder, "cpu")[0]
    chosen, reason, is_fixed = own_dtype(folder)
    if not is_fixed and chosen in HALVES and torch.cuda.get_device_capability(device) < HALVES[chosen]:
        chosen, reason = "float32", f"as {device} is slow in {chosen}"
    slow = "" if chosen != "float32" else "; tensor cores need float16 or bfloat16"
    log.warning("%s is computed in %s, %s (dtype names another)%s", folder, chosen, reason, slow)
    return chosen


def copy(folder: Path, to: Path) -> None:
    for path in files(folder):
        shutil.copyfile(path, to / path.name)


def example(model: ServedModel, directory: str | Path, count: int = 1, tokens: int | None = None) -> Batch:
    """A made-up batch of a network in this directory: for exporting, for timing, and to warm up."""
    if model.reads_text:
        words = WORDS if tokens is None else max(1, tokens - AROUND)
        return model.encode([" ".join([WORD] * words)] * count)
    return model.encode([np.zeros(_usual_image(locate(directory)), np.float32)] * count)
