"""What the demo model must show: a real exit curve at little loss, that moves deeper as inputs get harder."""

from itertools import pairwise

import pytest

from deployments.demo import demo_digits, demo_directory, held_out_digits
from deployments.models import TorchModel, load
from deployments.models.ramps import RULES, ExitRules, read_rules


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return load(demo_directory())


@pytest.fixture(scope="module")
def rules() -> ExitRules:
    return read_rules(demo_directory() / RULES)


def test_it_reads_held_out_digits(model: TorchModel) -> None:
    images, labels = held_out_digits()
    exits = model.run(model.encode(list(images)), model.num_blocks, ()).exits
    assert (exits.labels == labels).mean() >= 0.95


def test_inputs_leave_all_along_the_network_at_little_loss(rules: ExitRules) -> None:
    survival = [rule.survival or 0.0 for rule in rules.ramps]
    assert 0.2 <= survival[len(survival) // 2] <= 0.8
    leaving = [before - after for before, after in pairwise([1.0, *survival])]
    assert sum(share >= 0.03 for share in leaving) >= 4
    assert (rules.full_accuracy or 0.0) >= 0.95
    assert (rules.full_accuracy or 0.0) - (rules.exit_accuracy or 0.0) <= 0.01


def test_noise_moves_the_exits_deeper(model: TorchModel) -> None:
    depths = []
    for noise in (0.0, 0.2, 0.4, 0.8):
        images, _ = demo_digits(1000, noise, seed=5)
        exits = model.run(model.encode(list(images)), model.num_blocks, model.ramp_blocks).exits
        depths.append(exits.blocks.mean())
    assert all(later > earlier * 1.03 for earlier, later in pairwise(depths))
