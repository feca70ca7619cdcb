import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.profiles.forecast import Forecaster
from isobatch.profiles.series import Reading, Series
from isobatch.profiles.windows import MOST, Window

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 10**9) | st.integers(0, MOST - 1)
windows = st.builds(Window, st.floats(0, 1e6), st.floats(1e-3, 1e3), counts, st.tuples(*[counts] * 4), counts)


def drifting(count: int, blocks: int = 4, inputs: int = 4000, seed: int = 0) -> list[Window]:
    """Windows whose share of leavers wanders."""
    rng = np.random.default_rng(seed)
    hazard = 1 / (1 + np.exp(1.0 - np.cumsum(rng.normal(0, 0.05, count))))
    inside = hazard[:, None] * (1 - hazard[:, None]) ** np.arange(blocks - 1)
    shares = np.column_stack([inside, 1 - inside.sum(axis=1)])
    return [
        Window(120.0 * i, 120.0, inputs, tuple(map(int, rng.multinomial(inputs, row)))) for i, row in enumerate(shares)
    ]


@settings(max_examples=20)
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
    assert forecast.inputs_per_text is None or 0 < forecast.inputs_per_text < np.inf


def test_how_long_texts_will_be_is_forecast_and_not_forgotten_while_none_come() -> None:
    def window(index: int, inputs: int, texts: int) -> Window:
        return Window(120.0 * index, 120.0, inputs, (inputs, 0), texts)

    longer = [window(index, 300 * (1 if index < 20 else 2), 300) for index in range(30)]
    forecaster = Forecaster.after(longer, 2)
    assert forecaster.forecast().inputs_per_text == pytest.approx(2.0, rel=0.05)
    forecaster.observe(window(30, 0, 0))
    assert forecaster.forecast().inputs_per_text == pytest.approx(2.0, rel=0.05)
    assert Forecaster.after([window(0, 300, 0)], 2).forecast().inputs_per_text is None


def test_windows_before_the_first_text_say_nothing_of_how_long_texts_will_be() -> None:
    idle, busy = Window(0.0, 120.0, 0, (0, 0)), Window(120.0, 120.0, 9000, (9000, 0), texts=90)
    forecaster = Forecaster.after([idle] * 3, 2)
    forecaster.observe(busy)
    assert forecaster.forecast().inputs_per_text == pytest.approx(100)
    assert Forecaster.after([idle, busy], 2).forecast().inputs_per_text == pytest.approx(100)


@settings(max_examples=30)
@given(st.lists(finite, max_size=50), st.lists(finite, max_size=3))
def test_a_series_never_raises_on_any_finite_history(values: list[float], more: list[float]) -> None:
    series = Series(map(Reading.exactly, values))
    series.refit()
    for value in more:
        series.append(Reading.exactly(value))
    prediction = series.predict()
    assert np.isfinite(prediction.mean)
    assert prediction.sd >= 0


KINDS = ("wanders", "jumps about a level", "both", "steps", "is still")


def shares(kind: str, random: np.random.Generator, count: int = 240) -> np.ndarray:
    """The true share at one ramp, window by window."""
    odds = {
        "wanders": lambda: np.cumsum(random.normal(0, 0.05, count)),
        "jumps about a level": lambda: random.normal(0, 0.2, count),
        "both": lambda: np.cumsum(random.normal(0, 0.03, count)) + random.normal(0, 0.2, count),
        "steps": lambda: np.repeat(random.normal(0, 0.8, count // 60), 60),
        "is still": lambda: np.zeros(count),
    }[kind]()
    return np.asarray(1 / (1 + np.exp(random.uniform(-2, 2) - odds)))


@pytest.mark.parametrize("inputs", [30, 300, 3000])
def test_as_good_as_the_best_method_and_95_of_100_lie_inside(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ARIMA, which takes longer: `make bench-forecast` has it.

    1,800 forecasts tell their share inside to within 1.6 points or so, as neighbours depend on each other.
    """
    monkeypatch.setattr("isobatch.profiles.forecast.REFIT_EVERY", 10**9)
    errors, inside = [], []
    for seed, kind in enumerate(KINDS * 2):
        random = np.random.default_rng([seed, inputs])
        forecaster = Forecaster(2)
        for index, share in enumerate(shares(kind, random)):
            survivors = random.binomial(inputs, share)
            if index >= 60:
                forecast = forecaster.forecast()
                alone = forecaster.singles()[0]
                forecasts = [forecast.exits.survival[1], *(alone[way] for way in alone if way != "arima")]
                errors.append(np.abs(np.array(forecasts) - survivors / inputs))
                inside.append(forecast.survival_low[1] <= survivors / inputs <= forecast.survival_high[1])
            forecaster.observe(Window(0.0, 120.0, inputs, (inputs - survivors, survivors)))
    ours, *singles = np.mean(errors, axis=0)
    assert ours <= 1.02 * min(singles)
    assert 0.93 <= np.mean(inside) <= 0.97


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


def test_windows_and_ramps_of_another_network_are_refused() -> None:
    with pytest.raises(ValueError, match="window of 4 blocks for a network of 5"):
        Forecaster(5).observe(Window(0.0, 120.0, 1, (1, 0, 0, 0)))
    with pytest.raises(ValueError, match="between 0 and 2"):
        Forecaster(4, ramp_blocks=(3,))
