"""An input that fits the served network, and its shape: the interface's description shows them, `isobatch serve` prints
one, and `isobatch load` makes up such inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.demo import A_DIGIT
from deployments.folders import checkpoint_json
from deployments.models.levels import is_cascade, read_levels

USUAL = 224  # pixels of an image's side, where a checkpoint does not say


@dataclass(frozen=True)
class Example:
    """An input: None for a network of which too little is known. `shape`: an image's height, width and, where it is
    coloured, channels.
    """

    value: Any = None
    shape: tuple[int, ...] | None = None


def example_of(model: str | Path | None) -> Example:
    """Of a checkpoint a text where it has a vocabulary, a grey square where it has channels; of the demo a digit."""
    if model is None:
        return Example(list(map(list, A_DIGIT)), (len(A_DIGIT), len(A_DIGIT[0])))
    folder = _checkpoint(Path(model))
    config = checkpoint_json(folder)
    if "vocab_size" in config:
        labels_words = any("TokenClassification" in name for name in config.get("architectures") or ())
        return Example("a text whose words are to be labelled" if labels_words else "a text to be classified")
    if "num_channels" not in config:
        return Example()
    shape = _shape(config, checkpoint_json(folder, "preprocessor_config.json"))
    return Example(_grey(shape), shape)


def _shape(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> tuple[int, ...]:
    """What the network was built for, or what its preprocessor makes of an image."""
    height, width = _sides(config.get("image_size")) or _made(preprocessor)
    channels = config["num_channels"]
    return (height, width) if channels == 1 else (height, width, channels)


def _checkpoint(directory: Path) -> Path:
    """This one; or of a cascade the one that is asked first."""
    return directory / read_levels(directory).levels[0].folder if is_cascade(directory) else directory


def _made(preprocessor: Mapping[str, Any]) -> tuple[int, int]:
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
