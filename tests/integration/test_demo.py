"""What the shipped demo must show: a real exit curve at little loss, that moves deeper as inputs get harder."""

import pytest

from experiments.demos.quality import Quality, quality_of
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.models import TorchModel, load


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return load(demo_directory())


@pytest.fixture(scope="module")
def quality(model: TorchModel) -> Quality:
    return quality_of(model, seed=23)


def test_it_shows_here_and_now_all_that_a_demo_must(quality: Quality) -> None:
    """On other inputs than those that it was chosen by, in this processor's arithmetic."""
    assert quality.shortcomings() == []
