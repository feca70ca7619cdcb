"""`make bench-scale`, on a fleet so small that it takes no time."""

from experiments.scale import run


def test_a_small_fleet_is_planned_for_and_counted_and_answers_in_time() -> None:
    found = run.measure("8", most_per_s=500)
    assert found["connections_of_a_front_8"] == 8
    assert found["in_time_8"] > 0.95
    assert (found["offered_per_s_8"], found["fronts_8"]) == (500, 1)
    assert all(value > 0 for value in found.values())
