"""An input that fits the served network: the interface's description shows it, and `isobatch serve` prints it."""

import json
from pathlib import Path
from typing import Any

from deployments.config import AppConfig
from deployments.demo import A_DIGIT

USUAL = 224  # pixels of an image's side, where a checkpoint does not say


def example_input(config: AppConfig) -> Any:
    """None for a network of which too little is known."""
    return list(map(list, A_DIGIT)) if config.model is None else example_of(Path(config.model))


def example_of(directory: Path) -> Any:
    """A text for a network with a vocabulary, a grey square for one with channels."""
    config = _read(directory / "config.json")
    if "vocab_size" in config:
        labels_words = any("TokenClassification" in name for name in config.get("architectures") or ())
        return "a text whose words are to be labelled" if labels_words else "a text to be classified"
    if "num_channels" in config:
        side = config.get("image_size", USUAL)
        pixel: Any = 0.5 if config["num_channels"] == 1 else [0.5] * config["num_channels"]
        return [[pixel] * side] * side
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
