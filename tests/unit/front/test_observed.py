from collections import Counter
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.front.observed import LaunchShape, LaunchTimes, Observed, latency_bin, merged

counts = st.integers(0, 1000)


@st.composite
def observations(draw):
    launches = draw(
        st.dictionaries(
            st.builds(LaunchShape, st.just("a"), counts, counts, counts),
            st.builds(LaunchTimes, counts, counts, counts, counts),
        )
    )
    latencies = Counter(latency_bin(s) for s in draw(st.lists(st.floats(0, 10))))
    start, seconds, exits = draw(counts), draw(st.integers(1, 100)), draw(st.lists(counts, min_size=2, max_size=2))
    return Observed(start, seconds, draw(counts), draw(counts), tuple(exits), launches, {"a": start}, latencies)


@given(st.lists(observations(), min_size=1, max_size=5))
def test_fronts_may_be_merged_one_by_one_or_all_at_once(parts):
    assert reduce(lambda one, other: merged([one, other]), parts) == merged(parts)


@given(st.lists(st.floats(1e-4, 100), min_size=1))
def test_quantiles_are_good_to_five_percent(seconds):
    seen = Observed(0, 1, 0, 0, (), latencies=Counter(map(latency_bin, seconds)))
    assert seen.quantile_s(1.0) == pytest.approx(max(seconds), rel=0.051)
    assert Observed(0, 1, 0, 0, ()).quantile_s(0.5) is None
