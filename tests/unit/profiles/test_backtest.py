"""The claims' own arithmetic, and the traces they are made of."""

import numpy as np
import pytest

from experiments.forecast.backtest import WARM_UP, backtest
from experiments.forecast.run import wandering
from experiments.forecast.traces import DAY, Trace, arrivals, elasticbert, sampled, tenants
from experiments.shared.public_data import data
from profiles.errors import UserError
from profiles.windows import Window


def needs(name: str) -> None:
    try:
        data(name)
    except UserError as error:
        pytest.skip(str(error))


def test_a_day_that_never_changes_is_forecast_exactly() -> None:
    day = (Window(0.0, 120.0, 100, (50, 0, 25, 25)),) * (WARM_UP + 5)
    test = backtest(Trace("constant", "none", 100, day))
    assert test.actual.shape == (5, 2)  # two cuts: nobody leaves after block 1
    assert test.error("last") == test.error("mean10") == 0
    assert test.error("forecast") < 0.01
    assert test.inside == 1


def test_the_past_is_not_told_the_future() -> None:
    calm, changed = ((Window(0.0, 120.0, 100, left),) for left in ((50, 50), (10, 90)))
    test = backtest(Trace("step", "none", 100, calm * (WARM_UP + 3) + changed * 3))
    assert test.last[3, 0] == pytest.approx(0.5)
    assert test.last[4, 0] == pytest.approx(0.9)
    assert abs(test.forecast[3, 0] - 0.5) < 0.01


def test_sampled_windows_follow_their_shares() -> None:
    groups = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    shares = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    first, second = sampled(groups, shares, np.array([3.0, 1.0]), inputs=1000, seed=0)
    assert (first.left[1], second.left[0]) == (0, 0)
    assert 2 < first.arrived / second.arrived < 4


def test_wandering_windows_leave_at_every_ramp() -> None:
    assert all(min(window.left) > 0 for window in wandering(ramps=12, count=5))


def test_real_traces_are_a_day_of_shares() -> None:
    needs("exits/elasticbert/imdb_6exits.tsv")
    needs("arrivals/azure_functions/invitro_1000_inv.csv")
    groups = elasticbert(6, patience=2)
    np.testing.assert_allclose(groups.sum(axis=1), 1)
    assert groups[0, 2] == 1  # who never changes its mind leaves as soon as two agreements are possible
    assert tenants(0).shape == (DAY, 3)
    assert arrivals(0).shape == (DAY,)
