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
