"""Lengths of texts, and times for lengths that nobody measured."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, load, save
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.lengths import Lengths, at_length, read_lengths

LAUNCH_S, EACH_S, ATTENTION_S = 0.002, 1e-4, 1e-6


def seconds(tokens: float, length: float) -> float:
    """Of one block: every token costs the same, and attention as much as its text is long."""
    return LAUNCH_S + tokens * (EACH_S + ATTENTION_S * length)


def table(length: int, sizes: tuple[int, ...] = (1, 8, 64), source: str = "measured: a formula") -> LatencyTable:
    rows = tuple(tuple(seconds(size * length, length) * (block + 1) for block in range(2)) for size in sizes)
    return LatencyTable(
        "cpu", sizes, rows, ((1e-5, 0.0),) * len(sizes), 0.001, (100 * length,) * 2, (7, 7), source, length
    )


@given(st.integers(20, 300), st.floats(0.2, 60))
def test_times_in_between_are_those_of_the_tokens_and_of_their_texts_length(length: int, size: float) -> None:
    result = at_length([table(300), table(20), table(100)], length)
    tokens = size * length
    low, high = (20, 100) if length <= 100 else (100, 300)
    assert result.length == length
    if high <= tokens <= 64 * low:  # where both are measured
        assert result.block_times_s(size) == pytest.approx(
            [seconds(tokens, length), 2 * seconds(tokens, length)], rel=1e-3
        )


@given(st.sampled_from([10, 20, 60, 100, 400]), st.floats(0.05, 60), st.floats(1.0, 1.5))
def test_more_tokens_never_take_less(length: int, size: float, more: float) -> None:
    result = at_length([table(20), table(100)], length)
    size, larger = min(size, result.largest), min(size * more, result.largest)
    assert (result.block_times_s(larger) >= result.block_times_s(size) * (1 - 1e-9)).all()


def test_a_length_that_was_measured_is_taken_as_it_is_and_others_keep_their_tokens() -> None:
    assert at_length([table(20), table(100)], 100) == table(100)
    alone = at_length([table(100)], 25)
    assert alone.batch_sizes == (4, 32, 256)
    assert alone.hidden_bytes == (2500, 2500)
    assert "measured at 100 tokens" in alone.source
    assert at_length([table(100, sizes=(1, 2))], 1000).largest == 1


def test_times_of_different_backends_or_precisions_are_not_mixed() -> None:
    eager, compiled = replace(table(20), backend="torch"), replace(table(100), backend="onnx")
    assert at_length([eager, compiled], 50) == at_length([eager], 50)
    assert at_length([eager, compiled], 80) == at_length([compiled], 80)
    exact, coarse = replace(table(20), dtype="float32"), replace(table(100), dtype="bfloat16")
    assert at_length([exact, coarse], 80) == at_length([coarse], 80)
    assert at_length([table(20), coarse], 80) != at_length([coarse], 80)  # of the first, it was not noted


def test_the_profile_gives_the_table_that_plans_count_by() -> None:
    profile = Profile("net", (table(20), table(100)))
    assert profile.table_of("cpu", None) == profile.table("cpu") == table(100)
    assert profile.table_of("cpu", 60).length == 60
    guessed = table(60, source="datasheet: net in float32")
    assert Profile("net", (table(20), guessed)).table_of("cpu", 60).batch_sizes[0] == pytest.approx(1 / 3, rel=1e-5)


def test_of_many_lengths_quantiles_are_kept() -> None:
    lengths = np.random.default_rng(0).integers(3, 200, 5000)
    result = Lengths.of(lengths.tolist())
    assert len(result.tokens) == 100
    assert result.mean == pytest.approx(lengths.mean(), rel=0.02)
    assert result.spread(16).mean() == pytest.approx(lengths.mean(), rel=0.05)
    assert set(result.drawn(1000, np.random.default_rng(1)).tolist()) <= set(result.tokens)
    for wrong in ((), (0, 4), (5, 4)):
        with pytest.raises(ValueError, match="lengths must"):
            Lengths(wrong)


def test_lengths_and_exits_by_tokens_are_kept_in_the_file(tmp_path: Path) -> None:
    exits, by_tokens = ExitProfile((1.0, 0.5)), ExitProfile((1.0, 0.7))
    profile = Profile("net", (table(20),), exits, lengths=Lengths((4, 20, 36)), token_exits=by_tokens)
    save(profile, tmp_path / "p.json")
    assert load(tmp_path / "p.json") == profile
    assert profile.length == 20
    assert (profile.exits_of(20).survival, profile.exits_of(None).survival) == ((1.0, 0.7), (1.0, 0.5))
    again = Profile("net", (table(100),), ExitProfile((1.0, 0.4)))
    joined = profile.joined_by(again)
    assert (joined.lengths, joined.exits, joined.token_exits) == (profile.lengths, again.exits, None)
    assert joined.exits_of(20).survival == (1.0, 0.4)
    assert profile.joined_by(Profile("net", (table(100),))).token_exits == by_tokens


def test_a_file_of_lengths_is_read_in_order_and_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12\n\n7\n")
    assert read_lengths(path) == (12, 7)
    for content, says in (
        ("12\nmany\n", "line 2: 'many'"),
        ("0", "line 1: '0'"),
        ("1000001", "line 1: '1000001' must be a number of tokens, 1 to 1000000"),
        ("²", "line 1: '²'"),
        ("\n", "is empty"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=says):
            read_lengths(path)
