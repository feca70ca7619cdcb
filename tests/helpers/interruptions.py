"""A Ctrl-C in the middle of long work."""

from itertools import count
from typing import Any

import pytest

from isobatch.profiles.measure import one_round

WARMING = 3  # rounds before the first that counts


def interrupt_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Ctrl-C comes when a network's blocks are timed with one input, but with no larger batch yet."""
    number, interruptions = count(), [KeyboardInterrupt()]

    def once(model: Any, batch: Any, stopwatch: Any) -> Any:
        if next(number) >= WARMING and len(batch) > 1 and interruptions:
            raise interruptions.pop()
        return one_round(model, batch, stopwatch)

    monkeypatch.setattr("isobatch.profiles.measure.one_round", once)
