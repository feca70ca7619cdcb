"""`make bench-cluster`: the part that needs no Ray, and what is kept of parts."""

from experiments.cluster import fleets


def test_a_link_that_is_declared_slow_is_avoided_by_the_next_plan() -> None:
    found = fleets.slow_link()
    assert found["slow_link_avoided"] == 1.0
    assert found["slow_link_good_share_after"] > 0.95 > found["slow_link_good_share_before"]
