"""An example input for the served network, and its shape.

The interface's description shows it, `isobatch serve` prints it, and `isobatch load` sends inputs of this shape.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.deployments.demo import A_DIGIT
from isobatch.deployments.folders import checkpoint_json
from isobatch.deployments.models.levels import is_cascade, read_levels

USUAL = 224  # the side of an image in pixels where a checkpoint does not tell: the most common size


@dataclass(frozen=True)
class Example:
    """An input; None where the checkpoint does not describe it. `shape` is (height, width[, channels]) of an image."""

    value: Any = None
    shape: tuple[int, ...] | None = None


def example_of(model: str | Path | None) -> Example:
    """A text for a checkpoint with a vocabulary, a grey image for one with channels, a digit for the demo."""
    if model is None:
        return Example(list(map(list, A_DIGIT)), (len(A_DIGIT), len(A_DIGIT[0])))
    folder = Path(model)
    if is_cascade(folder):
        folder /= read_levels(folder).levels[0].folder
    config = checkpoint_json(folder)
    if "vocab_size" in config:
        labels_words = any("TokenClassification" in name for name in config.get("architectures") or ())
        return Example("a text whose words are to be labelled" if labels_words else "a text to be classified")
    config = {**(config.get("backbone_config") or {}), **config}
    if "num_channels" not in config:
        return Example()
    preprocessor, channels = checkpoint_json(folder, "preprocessor_config.json"), config["num_channels"]
    cut = preprocessor.get("crop_size") if preprocessor.get("do_center_crop") else None
    sizes = map(_sides, (config.get("image_size"), cut, preprocessor.get("size")))
    shape = *next(filter(None, sizes), (USUAL, USUAL)), *(() if channels == 1 else (channels,))
    return Example(np.full(shape, 0.5).tolist(), shape)


def _sides(size: Any) -> tuple[int, int] | None:
    """
    >>> _sides(32), _sides([32, 64]), _sides({"height": 32, "width": 64}), _sides({"shortest_edge": 32}), _sides(None)
    ((32, 32), (32, 64), (32, 64), (32, 32), None)
    """
    match size:
        case int(side) | {"shortest_edge": int(side)}:
            return side, side
        case [int(height), int(width)] | {"height": int(height), "width": int(width)}:
            return height, width
    return None
