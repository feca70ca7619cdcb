"""What the shipped demo must show: a real exit curve at little loss, that moves deeper as inputs get harder."""

from itertools import pairwise

import pytest

from deployments.demo import demo_directory
from deployments.demo.digits import held_out_digits
from deployments.models import TorchModel, load
from deployments.models.ramps import ExitRules, read_rules
from experiments.demos.quality import Quality, quality_of
from profiles.promise import RULES


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return load(demo_directory())


@pytest.fixture(scope="module")
def quality(model: TorchModel) -> Quality:
    return quality_of(model, seed=23)


@pytest.fixture(scope="module")
def rules() -> ExitRules:
    return read_rules(demo_directory() / RULES)


def test_it_reads_held_out_digits(model: TorchModel) -> None:
    images, labels = held_out_digits()
    exits = model.run(model.encode(list(images)), model.num_blocks, ()).exits
    assert (exits.labels == labels).mean() >= 0.95


def test_inputs_leave_all_along_the_network_at_little_loss(rules: ExitRules) -> None:
    """As exits.json says, measured when the demo was made."""
    survival = [rule.survival or 0.0 for rule in rules.ramps]
    assert 0.2 <= survival[len(survival) // 2] <= 0.8
    leaving = [before - after for before, after in pairwise([1.0, *survival])]
    assert sum(share >= 0.03 for share in leaving) >= 4
    assert (rules.full_accuracy or 0.0) >= 0.95
    assert (rules.full_accuracy or 0.0) - (rules.exit_accuracy or 0.0) <= 0.01


def test_it_shows_here_and_now_all_that_a_demo_must(quality: Quality) -> None:
    """On other inputs than those that it was chosen by, in this processor's arithmetic."""
    assert quality.shortcomings() == []


def test_noise_moves_the_exits_deeper(quality: Quality) -> None:
    assert all(later.mean > earlier.mean * 1.03 for earlier, later in pairwise(quality.depths))
