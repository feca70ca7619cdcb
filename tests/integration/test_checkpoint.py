"""A real network behind the real front: what many clients get at once is what each input gets alone, without Ray."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.uncut import answers_as_uncut


@pytest.fixture(scope="module")
def front(deployed: Callable[..., str], checkpoint: Path) -> str:
    arguments = {"model": str(checkpoint), "slo_ms": 60_000}  # so that a busy machine refuses nothing
    return deployed({"name": "vit", "import_path": "deployments.app:build", "args": arguments})


def test_answers_equal_those_of_each_input_alone(front: str, checkpoint: Path) -> None:
    images = np.random.default_rng(3).normal(size=(120, 8, 8)).tolist()
    answers = answers_as_uncut(front, checkpoint, images, 16)
    assert len({answer["exit_block"] for answer in answers}) > 1
