"""A request that works for the served model, which `isobatch serve` prints once it has started."""

import json
from pathlib import Path
from typing import Any

from cluster.serving.serve_file import ServeFile, decoders, ours
from deployments.demo.sums import prompt_of

USUAL = 224  # pixels of an image's side, where a checkpoint does not say


def example(content: ServeFile) -> tuple[str, str] | None:
    """The path and the JSON body for the first application of ours, or None for a checkpoint of an unknown kind."""
    if decoders(content):
        return "/v1/completions", json.dumps({"prompt": prompt_of(47, 85), "max_tokens": 24})
    body = example_body(content)
    return None if body is None else ("/predict", body)


def example_body(content: ServeFile) -> str | None:
    """The JSON body for the first application that classifies."""
    application = next(iter(ours(content)), None)
    if application is None:
        return None
    model = (application.get("args") or {}).get("model")
    one = _of_checkpoint(Path(model)) if model else _digit()
    return None if one is None else json.dumps({"inputs": [one]}, separators=(",", ":"))


def _digit() -> Any:
    from sklearn.datasets import load_digits

    return load_digits().images[-1].astype(int).tolist()


def _of_checkpoint(directory: Path) -> Any:
    """A text for a network with a vocabulary, a grey square for one with channels."""
    config = _read(directory / "config.json")
    if "vocab_size" in config:
        return "a text to be classified"
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
