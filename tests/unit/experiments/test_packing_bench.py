"""The figures of `make bench-packing` have the names that are quoted, and are made from the same answers."""

from pathlib import Path

import numpy as np
import pytest

from experiments.packing import texts
from experiments.packing.padded import PaddedModel
from experiments.packing.run import (
    LATER,
    SOON,
    PackedTimes,
    Pair,
    packed_over_padded,
    packed_over_sorted,
    padded_tokens,
    pair_on,
    real_tokens,
)


def test_what_answers_differently_is_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(texts, "WORDS", 100)
    pair = pair_on("torch", 1, tmp_path)
    other = PaddedModel(pair.padded, lambda ids, present: present[:, :2].float())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logits differ"):
        packed_over_padded(Pair(pair.packed, other, is_exact=True), [texts.batch_of([3, 4], 0)], 1)


def test_texts_of_one_length_are_served_alike_and_of_many_better_packed() -> None:
    known = [[length] * count for length in (4, 40) for count in (1, 8, 16)]
    packed = PackedTimes(known, [0.01 + 0.001 * real_tokens(each) for each in known])
    assert packed.error(real_tokens) == pytest.approx(0, abs=1e-6)
    padded = PackedTimes(known, [0.01 + 0.001 * padded_tokens(each) for each in known])
    assert packed_over_sorted(packed, padded, np.array([20])) == pytest.approx(1.0, rel=0.01)
    soon, later = (packed_over_sorted(packed, padded, np.arange(4, 41), launches) for launches in (SOON, LATER))
    assert 1.02 < later < soon < 2.0
