from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.forecast import Forecaster
from profiles.series import ENOUGH_FOR_ARIMA, Series
from profiles.windows import MOST, Window

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 10**9) | st.integers(0, MOST - 1)
windows = st.builds(
    Window,
    st.floats(0, 1e6),
    st.floats(1e-3, 1e3),
    counts,
    st.tuples(*[counts] * 4),
)


def drifting(count: int, blocks: int = 4, inputs: int = 4000, seed: int = 0) -> list[Window]:
    """Windows whose share of leavers wanders."""
    rng = np.random.default_rng(seed)
    hazard = 1 / (1 + np.exp(1.0 - np.cumsum(rng.normal(0, 0.05, count))))
    inside = hazard[:, None] * (1 - hazard[:, None]) ** np.arange(blocks - 1)
    shares = np.column_stack([inside, 1 - inside.sum(axis=1)])
    return [
        Window(120.0 * i, 120.0, inputs, tuple(map(int, rng.multinomial(inputs, row)))) for i, row in enumerate(shares)
    ]


@settings(max_examples=20, deadline=None)
@given(st.lists(windows, max_size=40))
def test_any_history_gives_a_curve_in_range_with_its_interval_around_it(history: list[Window]) -> None:
    forecast = Forecaster.after(history, 4).forecast()
    curves = (forecast.survival_low, forecast.exits.survival, forecast.survival_high)
    for curve in curves:
        assert curve[0] == 1.0
        assert (np.diff(curve) <= 0).all()
        assert 0 <= min(curve) <= max(curve) <= 1
    assert (np.diff(curves, axis=0) >= 0).all()
    assert 0 <= forecast.arrivals_low_per_s <= forecast.arrivals_per_s <= forecast.arrivals_high_per_s < np.inf
    assert len(forecast.methods) == 4


@settings(max_examples=30, deadline=None)
@given(st.lists(finite, max_size=50), st.lists(finite, max_size=3))
def test_a_series_never_raises_on_any_finite_history(values: list[float], more: list[float]) -> None:
    series = Series(values)
    series.refit()
    for value in more:
        series.append(value)
    prediction = series.predict()
    assert np.isfinite(prediction.mean)
    assert prediction.sd >= 0


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ([], "last"),
        ([1.0, 2.0], "last"),
        ([1.0, 2.0, 1.0, 2.0], "smoothing"),
        ([3.0] * 100, "smoothing"),
        (np.random.default_rng(1).normal(size=ENOUGH_FOR_ARIMA - 1).tolist(), "smoothing"),
        (np.random.default_rng(1).normal(size=ENOUGH_FOR_ARIMA).tolist(), "arima"),
    ],
)
def test_it_falls_back_step_by_step_and_says_so(values: list[float], method: str) -> None:
    series = Series(values)
    series.refit()
    assert series.predict().method.startswith(method)


def test_a_fit_that_fails_falls_back_to_smoothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise np.linalg.LinAlgError("singular")

    monkeypatch.setattr("profiles.series._arima", fail)
    series = Series(np.arange(50.0))
    series.refit()
    assert series.predict().method == "smoothing"


def test_it_beats_the_last_window_on_a_noisy_level() -> None:
    values = np.random.default_rng(2).normal(size=200)
    series, errors = Series(values[:100]), []
    series.refit()
    for before, value in pairwise(values[99:].tolist()):
        errors.append((abs(series.predict().mean - value), abs(before - value)))
        series.append(value)
    mine, lasts = np.mean(errors, axis=0)
    assert mine < 0.85 * lasts


def test_watching_gives_nearly_what_a_restart_gives() -> None:
    history = drifting(44)
    watching = Forecaster.after(history[:36], 4)
    for window in history[36:]:
        watching.observe(window)
    restarted = Forecaster.after(history, 4)
    np.testing.assert_allclose(watching.forecast().exits.survival, restarted.forecast().exits.survival, atol=0.03)


def test_blocks_without_a_ramp_inherit_and_empty_windows_change_little() -> None:
    history = [Window(0.0, 120.0, 100, (40, 0, 0, 60))] * 5
    forecaster = Forecaster.after(history, 4, ramp_blocks=(0,))
    for _ in range(3):
        forecaster.observe(Window(0.0, 120.0, 0, (0, 0, 0, 0)))
    forecast = forecaster.forecast()
    assert forecast.exits.survival == pytest.approx((1, 0.6, 0.6, 0.6), abs=0.01)
    assert len(forecast.methods) == 2


def test_the_fewer_inputs_the_wider_the_interval() -> None:
    def width(inputs: int) -> float:
        forecast = Forecaster.after([Window(0.0, 120.0, inputs, (inputs // 2, inputs // 2))] * 9, 2).forecast()
        return forecast.survival_high[1] - forecast.survival_low[1]

    assert width(10_000) == pytest.approx(2 * 1.96 * 0.005, rel=0.05)  # twice the binomial's standard deviation
    assert width(0) > width(10) > width(100) > width(10_000)


def test_a_window_far_outside_contradicts_and_a_tiny_one_does_not() -> None:
    history = drifting(60)
    forecast = Forecaster.after(history, 4).forecast()
    assert not forecast.contradicts(history[-1])
    assert forecast.contradicts(Window(0.0, 120.0, 4000, (0, 0, 0, 4000)))
    assert not forecast.contradicts(Window(0.0, 120.0, 1, (0, 0, 0, 1)))


def test_it_tells_how_it_was_made() -> None:
    assert "arima" in Forecaster.after(drifting(60), 4).forecast().method


def test_windows_and_ramps_of_another_network_are_refused() -> None:
    with pytest.raises(ValueError, match="window of 4 blocks for a network of 5"):
        Forecaster(5).observe(Window(0.0, 120.0, 1, (1, 0, 0, 0)))
    with pytest.raises(ValueError, match="between 0 and 2"):
        Forecaster(4, ramp_blocks=(3,))
