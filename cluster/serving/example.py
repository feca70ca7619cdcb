"""A request that works for the served model, which `isobatch serve` prints once it has started."""

import json

from cluster.serving.serve_file import ServeFile, decoders, ours, prefix_of
from deployments.demo.sums import prompt_of
from deployments.front.examples import example_of


def example(content: ServeFile) -> tuple[str, str] | None:
    """The path and the JSON body for the first application of ours, or None for a checkpoint of an unknown kind."""
    first = next((one for one in (*decoders(content), *ours(content))), {})
    if decoders(content):
        return f"{prefix_of(first)}/v1/completions", json.dumps({"prompt": prompt_of(47, 85), "max_tokens": 24})
    body = example_body(content)
    return None if body is None else (f"{prefix_of(first)}/predict", body)


def example_body(content: ServeFile) -> str | None:
    """The JSON body for the first application that classifies."""
    application = next(iter(ours(content)), None)
    if application is None:
        return None
    one = example_of((application.get("args") or {}).get("model")).value
    return None if one is None else json.dumps({"inputs": [one]}, separators=(",", ":"))
