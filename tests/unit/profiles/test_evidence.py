"""What a promise rests on: saved in a file, used for any ramps, and tested on inputs that chose nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import outcome
from tests.helpers.exit_tables import exit_table


def made_evidence(seed: int = 0) -> Evidence:
    return Evidence(exit_table(seed, count=800), exit_table(seed + 1, count=900), "accuracy", 0.03, 0.95)


def test_it_is_read_as_it_was_saved(tmp_path: Path) -> None:
    evidence = made_evidence()
    evidence.save(tmp_path / EVIDENCE)
    again = Evidence.read(tmp_path / EVIDENCE)
    assert (again.metric, again.max_loss, again.confidence) == ("accuracy", 0.03, 0.95)
    for name in ("candidates", "first", "right", "labels", "truth", "costs"):
        np.testing.assert_array_equal(getattr(again.shape, name), getattr(evidence.shape, name))
        np.testing.assert_array_equal(getattr(again.test, name), getattr(evidence.test, name))
    np.testing.assert_array_equal(again.prepared, evidence.prepared)
    with np.load(tmp_path / EVIDENCE) as arrays:
        np.testing.assert_array_equal(arrays["test_said"], evidence.test.labels)  # the name in files


def test_what_is_no_table_is_one_line(tmp_path: Path) -> None:
    for text in (b"", b"no archive"):
        (tmp_path / EVIDENCE).write_bytes(text)
        with pytest.raises(UserError, match=r"exit_table.npz: is not an exit table of 'isobatch prepare'"):
            Evidence.read(tmp_path / EVIDENCE)
    np.savez(tmp_path / EVIDENCE, pickled=np.array([{}], dtype=object))
    with pytest.raises(UserError, match="is not an exit table"):
        Evidence.read(tmp_path / EVIDENCE)
    with (tmp_path / EVIDENCE).open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="is not an exit table"):
        Evidence.read(tmp_path / EVIDENCE)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("shape_right", lambda array: array[:, 1:], r"shape_right has the shape \(4, 799\), and must have \(4, 800\)"),
        ("test_said", lambda array: array[1:], r"test_said has the shape \(3, 900\), and must have \(4, 900\)"),
        ("test_first", lambda array: array[0], r"test_first has the shape \(900,\)"),
        ("shape_first", lambda array: array + 99, "shape_first has 129, and must have at most"),
        ("shape_truth", lambda array: array - 1, "shape_truth must hold whole numbers, 0 or more"),
        ("test_right", lambda array: array * np.nan, "test_right must hold finite numbers only"),
        ("test_costs", lambda array: array[::-1], "test_costs must ascend from ramp to ramp"),
        ("test_candidates", lambda array: array + 1, "must have the same candidates and ramps"),
        ("terms", lambda array: 100 * array, r"terms = \[3.0, 95.0\] are no promise"),
        ("terms", lambda array: array[0], "unpack"),
    ],
)
def test_a_table_whose_arrays_disagree_is_refused_in_one_line(
    tmp_path: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]], reason: str
) -> None:
    made_evidence().save(tmp_path / EVIDENCE)
    with np.load(tmp_path / EVIDENCE) as saved:
        arrays = dict(saved)
    np.savez(tmp_path / EVIDENCE, **{**arrays, name: change(arrays[name])})
    with pytest.raises(UserError, match=f"{reason}.*: prepare again"):
        Evidence.read(tmp_path / EVIDENCE)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), ramps=st.sets(st.integers(0, 2)))
def test_only_the_ramps_that_are_open_let_inputs_leave_and_the_promise_is_kept(seed: int, ramps: set[int]) -> None:
    evidence = made_evidence(seed)
    chosen = evidence.proven_candidates(sorted(ramps), evidence.test.costs)
    exits = outcome(evidence.test, chosen, evidence.metric)
    assert set(exits.places.tolist()) <= ramps | {3}
    assert exits.cost == 1.0 or evidence.shows(exits.lost)
    survival = evidence.survival(chosen)
    assert survival[0] == 1.0
    assert list(survival) == sorted(survival, reverse=True)


def test_nobody_leaves_where_less_is_allowed_than_the_table_can_tell() -> None:
    evidence = replace(made_evidence(), test=exit_table(2, count=100))
    some, nobody = (
        evidence.agreeing_candidates(range(3), evidence.test.costs, inputs / 100) for inputs in (0.51, 0.49)
    )
    exits = outcome(evidence.test, some, "agreement")
    assert (exits.lost.mean, exits.cost < 1.0) == (0.0, True)
    np.testing.assert_array_equal(nobody, evidence.shape.strictest)


@given(allowed=st.floats(0.5, 20.0))
def test_half_an_input_is_added_to_those_that_differ(allowed: float) -> None:
    evidence = replace(made_evidence(), test=exit_table(2, count=100))
    chosen = evidence.agreeing_candidates(range(3), evidence.test.costs, allowed / 100)
    differ = round(100 * outcome(evidence.test, chosen, "agreement").lost.mean)
    assert differ + 0.5 <= allowed
    assert evidence.disagreement(chosen) == pytest.approx((differ + 0.5) / 100)


def test_what_is_hoped_for_never_looks_at_the_inputs_of_the_test() -> None:
    evidence = made_evidence()
    other = replace(evidence, test=exit_table(99, count=900))
    np.testing.assert_array_equal(
        evidence.likely_candidates([0, 2], evidence.test.costs), other.likely_candidates([0, 2], evidence.test.costs)
    )


def test_costs_decide_where_inputs_leave() -> None:
    """Where all that is dear comes after the second ramp, nothing is gained by the first."""
    evidence = made_evidence()
    flat = evidence.likely_candidates([0, 1, 2], np.array([0.25, 0.5, 0.75, 1.0]))
    late = evidence.likely_candidates([0, 1, 2], np.array([0.01, 0.011, 0.9, 1.0]))
    left = [outcome(evidence.shape, chosen, "accuracy").places for chosen in (flat, late)]
    assert (left[1] <= 1).mean() > (left[0] <= 1).mean()
