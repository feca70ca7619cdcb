"""Tabi's figures by hand, and what a network's processor time is taken of."""

from pathlib import Path

import pytest

from deployments.models import load_served
from experiments.cascade.compute import BATCH, seconds
from experiments.cascade.tabi import DISTILBERT, SETS, TabiSet, mean_s
from tests.helpers.cascade_directories import cascade_directory


@pytest.mark.parametrize("data_set", SETS, ids=lambda data_set: data_set.name)
def test_a_query_takes_the_small_network_and_those_that_go_on_the_large_one_too(data_set: TabiSet) -> None:
    assert mean_s(data_set.alone(), queries=200) == pytest.approx(1e-3 * data_set.large.ms, rel=0.02)
    by_hand_ms = DISTILBERT.ms + (1 - data_set.answered) * data_set.large.ms
    assert mean_s(data_set.cascade(), queries=3000) == pytest.approx(1e-3 * by_hand_ms, rel=0.06)


def test_every_text_is_answered_in_batches_of_one_size(tmp_path: Path) -> None:
    model, sizes = load_served(cascade_directory(tmp_path)), list[int]()
    run = model.run
    model.run = lambda batch, *rest: sizes.append(len(batch)) or run(batch, *rest)
    assert seconds(model, ["a good film", "dull"] * 20) > 0
    assert sizes[2:5] == [BATCH, BATCH, 40 - 2 * BATCH], "after a first launch through both levels"
    assert max(sizes) == BATCH
