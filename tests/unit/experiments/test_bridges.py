"""Exits with bridges: shapes fit; what is looked at is paid; a picture leaves when enough of its pixels are sure."""

import numpy as np
import pytest
import torch

from experiments.bridges.network import NUM_BLOCKS, Backbone, Costs, Exit
from experiments.bridges.run import EXITS, THRESHOLDS, Labelled, Scenes, costs_of


def test_an_exit_behind_any_block_labels_every_pixel_and_a_bridge_is_shorter_the_later_it_stands() -> None:
    backbone, scenes = Backbone(num_labels=3).eval(), Scenes.drawn(2, seed=1)
    states = list(backbone.features(scenes.pictures))
    exits = [Exit(backbone, block).eval() for block in range(NUM_BLOCKS - 1)]
    for each in exits:
        assert each(states[each.block], (32, 32)).shape == (2, 3, 32, 32)
    lengths = [len(each.bridge) for each in exits]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 2
    assert lengths[-1] == 0
    last = Exit(backbone, NUM_BLOCKS - 1).eval()
    assert torch.equal(last(states[-1], (32, 32)), backbone(scenes.pictures)), "they begin as copies"


def test_exits_that_are_looked_at_in_vain_are_paid_too() -> None:
    costs = Costs((10,) * NUM_BLOCKS, 10, (5, 4, 3, 2))
    assert costs_of(costs, ())[-1] == 1.0
    found = costs_of(costs, (0, 2))
    assert found == pytest.approx([(20 + 5) / 100, (40 + 5) / 100, (60 + 8) / 100, (80 + 8) / 100, 108 / 100])


def test_a_picture_leaves_where_all_but_so_many_of_its_pixels_are_sure() -> None:
    sure = np.full((len(EXITS) + 1, 1, 100), 0.999)
    sure[0, 0, :5] = 0.6
    seen = Labelled(np.zeros((len(EXITS) + 1, 1, 100), np.int64), sure, np.zeros((1, 100), np.int64))
    costs = np.linspace(0.2, 1.0, len(EXITS) + 1)
    strict = int(np.searchsorted(-THRESHOLDS, -0.99))
    for unsure, leaves_at in ((0.0, 1), (0.05, 0)):
        assert seen.table(unsure, costs).places(np.full(len(EXITS), strict)).tolist() == [leaves_at]
    assert seen.table(0.0, costs).agrees.tolist() == [[1.0]] * (len(EXITS) + 1)
