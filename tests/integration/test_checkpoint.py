"""A real network behind the real front: what many clients get at once is what each input gets alone, without Ray."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.asking import ask
from tests.helpers.uncut import answers_as_uncut


@pytest.fixture(scope="module")
def front(deployed: Callable[..., str], checkpoint: Path) -> str:
    arguments = {"model": str(checkpoint), "slo_ms": 60_000}  # so that a busy machine refuses nothing
    return deployed({"name": "vit", "import_path": "deployments.app:build", "args": arguments})


def test_answers_equal_those_of_each_input_alone(front: str, checkpoint: Path) -> None:
    images = np.random.default_rng(3).normal(size=(120, 8, 8)).tolist()
    answers = answers_as_uncut(front, checkpoint, images, 16)
    assert len({answer["exit_block"] for answer in answers}) > 1


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([[0.0] * 7] * 8, "image 0 is 8 x 7, it must be 8 x 8"),
        ("text", "an image must be an array of numbers"),
        ([[["x"] * 8] * 8], "an image must be an array of numbers"),
    ],
)
def test_what_is_no_image_is_refused(front: str, inputs: Any, sentence: str) -> None:
    status, reply = ask(front, "POST", "/predict", {"inputs": inputs})
    assert (status, sentence in reply["error"]) == (422, True), reply
