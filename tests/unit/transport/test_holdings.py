"""Survivors can be fetched with their key until they are dropped or expire."""

import numpy as np
import pytest

from isobatch.deployments.transport.holdings import Holdings, LostError
from isobatch.deployments.transport.packed import Packed, pack
from isobatch.profiles.model import Batch
from tests.helpers.clock import Clock


def batch(count: int = 3) -> Batch:
    return Batch(2, {"hidden": np.arange(count * 4.0).reshape(count, 4)}, np.zeros((count, 1), np.float32))


def test_survivors_expire_without_a_drop() -> None:
    clock = Clock()
    holdings = Holdings(clock)
    long, short, dropped = (holdings.hold(batch(), for_s) for for_s in (9.0, 1.0, 5.0))
    holdings.drop([dropped.key])
    clock.now_s = 1.0
    holdings.expire()
    assert len(holdings) == 1
    assert holdings.get(long.key)
    clock.now_s = 9.0
    holdings.hold(batch(), for_s=1.0)  # holding more looks after the rest too
    assert len(holdings) == 1
    for gone in (long, short):
        with pytest.raises(LostError):
            holdings.get(gone.key)


def test_a_request_does_not_restore_survivors_that_are_dropped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    holdings = Holdings()
    held = holdings.hold(batch(), for_s=1.0)

    def slow(state: Batch) -> Packed:
        holdings.drop([held.key])
        return pack(state)

    monkeypatch.setattr("isobatch.deployments.transport.holdings.pack", slow)
    assert len(holdings.packed(held.key, np.array([1]))) == 1
    assert len(holdings) == 0
