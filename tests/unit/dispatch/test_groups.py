"""The counts of a group of interchangeable replicas."""

import pytest

from isobatch.deployments.dispatch.groups import Group
from isobatch.deployments.dispatch.messages import Limits


@pytest.mark.parametrize("replicas", [1, 8])
@pytest.mark.parametrize("used", [0.25, 0.5, 1.0])
def test_the_used_share_of_replicas_whose_launches_end_together(replicas: int, used: float) -> None:
    group = Group("gpu", Limits())
    group.follow([f"gpu{number}" for number in range(replicas)])
    for round_s in range(3600, 3700):  # after an idle hour
        for replica in group.members.values():
            group.judge(replica, round_s + 1.0 - used, used, round_s + 1.0)
    assert group.used == pytest.approx(used, rel=0.25)  # the latest launches count most


def test_plans_count_on_a_replica_of_which_nothing_is_known_lately() -> None:
    group = Group("gpu", Limits(probe_every_s=5.0))
    group.follow(["fast", "slow"])
    group.distrust(group.members["slow"], 100.0)
    assert group.benched(112.0) == [], "no launch has shown since that it is still slow"
    for probed_s in (112.0, 118.0):
        group.distrust(group.members["slow"], probed_s)
    assert group.benched(118.0) == group.benched(170.0) == ["slow"]
    assert group.benched(3600.0) == [], "no input has come for an hour"
    group.distrust(group.members["slow"], 3601.0)
    assert group.benched(3601.0) == ["slow"]


def test_a_launch_that_waited_for_one_that_failed_is_not_blamed_for_its_time() -> None:
    group = Group("gpu", Limits())
    group.follow(["one", "other"])
    one = group.members["one"]
    for end_s in range(1, 7):
        group.judge(one, end_s - 1.0, 1.0, float(end_s))
    group.distrust(one, 16.0)  # both were sent at 6.0, and the first one hung
    group.judge(one, 6.0, 1.0, 17.0)
    assert one.slowdown == pytest.approx(1.0)
    assert group.working == 2


def test_a_replica_on_which_one_launch_with_audits_fails_after_another_is_benched() -> None:
    group, working = Group("gpu", Limits()), list[int]()
    group.follow(["one", "other"])
    one = group.members["one"]
    for succeeds in (True, False, False):
        group.distrust(one, 1.0, excused=True)
        if succeeds:
            group.judge(one, 1.0, 1.0, 2.0)
        working.append(group.working)
    assert working == [2, 2, 1]
