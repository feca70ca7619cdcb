"""An input that fits the served network, and its shape: the interface's description shows them, `isobatch serve` prints
one, and `isobatch load` makes up such inputs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments.config import AppConfig
from deployments.demo import A_DIGIT
from deployments.models.levels import is_cascade, read_levels

USUAL = 224  # pixels of an image's side, where a checkpoint does not say


def example_input(config: AppConfig) -> Any:
    """None for a network of which too little is known."""
    return list(map(list, A_DIGIT)) if config.model is None else example_of(Path(config.model))


def example_of(directory: Path) -> Any:
    """A text for a network with a vocabulary, a grey square for one with channels."""
    config = _read(_checkpoint(directory) / "config.json")
    if "vocab_size" in config:
        labels_words = any("TokenClassification" in name for name in config.get("architectures") or ())
        return "a text whose words are to be labelled" if labels_words else "a text to be classified"
    shape = shape_of(directory)
    return _grey(shape) if shape else None


def image_shape(config: AppConfig) -> tuple[int, ...] | None:
    """Height, width and, of coloured images, channels of what the network takes. None: texts, or it is not known."""
    return (len(A_DIGIT), len(A_DIGIT[0])) if config.model is None else shape_of(Path(config.model))


def shape_of(directory: Path) -> tuple[int, ...] | None:
    """The same of a checkpoint: what its network was built for, or what its preprocessor makes of an image."""
    directory = _checkpoint(directory)
    config = _read(directory / "config.json")
    if "num_channels" not in config:
        return None
    height, width = _sides(config.get("image_size")) or _made(_read(directory / "preprocessor_config.json"))
    channels = config["num_channels"]
    return (height, width) if channels == 1 else (height, width, channels)


def _checkpoint(directory: Path) -> Path:
    """This one; or of a cascade the one that is asked first."""
    return directory / read_levels(directory).levels[0].folder if is_cascade(directory) else directory


def _made(preprocessor: dict[str, Any]) -> tuple[int, int]:
    cut = preprocessor.get("crop_size") if preprocessor.get("do_center_crop") else None
    return _sides(cut) or _sides(preprocessor.get("size")) or (USUAL, USUAL)


def _sides(told: Any) -> tuple[int, int] | None:
    """
    >>> _sides(32), _sides([32, 64]), _sides({"height": 32, "width": 64}), _sides({"shortest_edge": 32}), _sides(None)
    ((32, 32), (32, 64), (32, 64), (32, 32), None)
    """
    match told:
        case int(side) | {"shortest_edge": int(side)}:
            return side, side
        case [int(height), int(width)] | {"height": int(height), "width": int(width)}:
            return height, width
    return None


def _grey(shape: Sequence[int]) -> Any:
    image: Any = 0.5
    for size in reversed(shape):
        image = [image] * size
    return image


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
