from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import ExtrapolationWarning, LatencyTable, cascade_table

TABLE = LatencyTable(
    kind="v100",
    batch_sizes=(1, 4, 16),
    block_s=((0.001, 0.002), (0.002, 0.002), (0.008, 0.005)),
    ramp_s=((0.0001, 0.0), (0.0001, 0.0), (0.0004, 0.0)),
    launch_s=0.0005,
    hidden_bytes=(1536, 8),
    memory_bytes=(10**6, 10**6),
    source="by hand",
)


def test_between_sizes_it_is_linear_and_below_the_smallest_flat() -> None:
    np.testing.assert_allclose(
        TABLE.block_times_s([0.2, 1, 2.5, 10]), [[1e-3, 2e-3]] * 2 + [[1.5e-3, 2e-3], [5e-3, 3.5e-3]]
    )
    assert TABLE.ramp_times_s(4).tolist() == [0.0001, 0.0]


def test_times_at_the_ends_of_an_interval() -> None:
    unsure = replace(TABLE, interval=((0.5, 2.0), (0.5, 3.0), (1.0, 1.0)))
    short, long = (unsure.at_end_of_interval(end) for end in (0, 1))
    assert short.block_s == ((0.0005, 0.001), (0.001, 0.001), (0.008, 0.005))
    assert long.ramp_s == pytest.approx(np.array([[0.0002, 0.0], [0.0003, 0.0], [0.0004, 0.0]]))
    assert long.interval == ()
    assert TABLE.at_end_of_interval(1) is TABLE


@pytest.mark.parametrize(
    ("interval", "problem"),
    [
        (((0.5, 2.0),), "interval has 1 rows, and must have 3: one per batch size"),
        (((0.5, 2.0), (2.0, 0.5), (1.0, 1.0)), "at batch 4 = .2.0, 0.5. must be two factors above 0"),
    ],
)
def test_an_interval_that_is_none_is_refused(interval: tuple[tuple[float, ...], ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(TABLE, interval=interval)


def test_beyond_the_largest_it_goes_on_in_a_straight_line_and_says_so() -> None:
    with pytest.warns(ExtrapolationWarning, match="v100: a batch of 32 is beyond the largest measured \\(16\\)"):
        times = TABLE.block_times_s([16, 24, 32])
    # Block 0 goes on with 0.5 ms per input; block 1, whose last inputs were cheap, with its average.
    np.testing.assert_allclose(times, [[0.008, 0.005], [0.012, 0.0075], [0.016, 0.01]])
    assert not TABLE.covers([1, 16.5])


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.floats(0, 0.01)), min_size=1, max_size=6),
    at=st.lists(st.floats(0, 200), min_size=2, max_size=20),
)
@pytest.mark.filterwarnings("ignore::isobatch.profiles.latency.ExtrapolationWarning")
def test_it_is_monotone_where_the_device_is(steps: list[tuple[int, float]], at: list[float]) -> None:
    sizes = np.cumsum([size for size, _ in steps])
    times = 0.001 + np.cumsum([seconds for _, seconds in steps])
    block_s, ramp_s = tuple((seconds,) for seconds in times.tolist()), ((0.0,),) * len(sizes)
    table = LatencyTable("any", tuple(sizes.tolist()), block_s, ramp_s, 0.0, (0,), (0,), "drawn")
    times_s = table.block_times_s(sorted(at))[:, 0]
    assert (np.diff(times_s) >= -1e-12).all()
    assert (times_s >= times[0] - 1e-12).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_sizes": (1, 4, 4)}, "4 follows 4"),
        ({"batch_sizes": (16, 4, 1)}, "batch_sizes must ascend, but 4 follows 16"),
        ({"batch_sizes": (1, float("nan"), 16)}, "must hold at least one size, from 1 to 1048576"),
        ({"batch_sizes": (0, 4, 16)}, "from 1 to 1048576"),
        ({"batch_sizes": (1, 4)}, "block_s has 3 rows, and must have 2: one per batch size"),
        ({"block_s": ((0.001, 0.002), (0.002,), (0.008, 0.005))}, "block_s at batch 4 has 1 blocks, expected 2"),
        ({"block_s": ((0.001, 0.0), (0.002, 0.1), (0.008, 0.005))}, "block_s at batch 1, block 1 = 0.0 must be more"),
        ({"ramp_s": ((0.0, -1.0), (0.0, 0.0), (0.0, 0.0))}, "ramp_s at batch 1, block 1 = -1.0"),
        ({"ramp_s": ((0.0, float("nan")), (0.0, 0.0), (0.0, 0.0))}, "block 1 = nan"),
        ({"hidden_bytes": (1536,)}, "hidden_bytes has 1 blocks, expected 2"),
        ({"memory_bytes": (1, -2)}, "memory_bytes\\[1\\] = -2"),
        ({"launch_s": -0.1}, "launch_s = -0.1"),
        ({"length": -5}, "length = -5 must be at least 1 token"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_the_offending_value(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(TABLE, **change)


def test_what_is_no_whole_number_of_texts_is_told_in_tokens() -> None:
    texts = replace(TABLE, batch_sizes=(0.231, 1, 15.923), length=13)
    assert [texts.size_text(size) for size in texts.batch_sizes] == ["3 tokens", "1", "207 tokens"]
    assert replace(texts, length=4).size_text(0.25) == "1 token"
    with pytest.warns(
        ExtrapolationWarning, match="v100: a batch of 260 tokens is beyond the largest measured .207 tok"
    ):
        texts.block_times_s(20.0001)


SMALL = LatencyTable("cpu", (1, 8), ((1.0, 2.0), (3.0, 4.0)), ((0.1, 0.0),) * 2, 0.5, (100, 4), (7, 8), "measured: a")
LARGE = LatencyTable("cpu", (1, 4, 16), ((5.0,), (8.0,), (20.0,)), ((0.0,),) * 3, 0.2, (4,), (9,), "measured: b")


def test_blocks_stand_side_by_side_at_every_size_that_both_know() -> None:
    both = cascade_table([SMALL, LARGE], carried_bytes=30)
    assert both.batch_sizes == (1, 4, 8)
    assert both.block_s[0] == (1.0, 2.0, 5.0)
    assert both.block_s[2] == (3.0, 4.0, 12.0)
    assert (both.ramp_s[0], both.launch_s, both.memory_bytes) == ((0.1, 0.0, 0.0), 0.5, (7, 8, 9))
    assert both.source == "measured: a; measured: b"


def test_the_widest_interval_counts() -> None:
    small = replace(SMALL, interval=((0.9, 1.1), (0.5, 1.5)))
    large = replace(LARGE, interval=((0.8, 1.0), (0.8, 1.0), (0.8, 1.0)))
    assert cascade_table([SMALL, LARGE], carried_bytes=30).interval == ()
    low, high = zip(*cascade_table([small, large], carried_bytes=30).interval, strict=True)
    assert low == pytest.approx((0.8, 0.9 - 0.4 * 3 / 7, 0.5))
    assert high == pytest.approx((1.1, 1.1 + 0.4 * 3 / 7, 1.5))


def test_the_text_of_the_next_level_travels_up_to_the_edge_and_then_nothing_else_does() -> None:
    assert cascade_table([SMALL, LARGE], carried_bytes=30).hidden_bytes == (130, 30, 4)


def test_levels_on_two_kinds_or_at_two_lengths_are_no_one_table() -> None:
    for other in (replace(LARGE, kind="v100"), replace(LARGE, length=9)):
        with pytest.raises(UserError, match="one kind and at one length"):
            cascade_table([SMALL, other], carried_bytes=30)
