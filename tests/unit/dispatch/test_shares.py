"""Several fronts over the same replicas, each with a dispatcher of its own that uses its share."""

import heapq
import random
from math import inf

from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.groups import Group
from isobatch.deployments.dispatch.messages import Launch, Limits, Place, Refusal
from isobatch.deployments.dispatch.route import Route
from tests.helpers.dispatcher_world import linear

ROUTE = Route((linear(0, 4, 8, "a", launch_s=0.02),))
REPLICAS = ["a1", "a2", "a3", "a4"]
CAPACITY = len(REPLICAS) * 8 / 0.02


def in_time_of_admitted(fronts: int, share: float, load: float, slo_s: float = 0.15) -> tuple[float, float]:
    """Play `fronts` dispatchers that know nothing of each other: shares of all admitted, and of the capacity."""
    draw = random.Random(fronts)
    dispatchers = [Dispatcher(ROUTE, {"a": REPLICAS}, Limits(share=share)) for _ in range(fronts)]
    free_s, admitted, in_time, at_s, number = dict.fromkeys(REPLICAS, 0.0), 0, 0, 0.0, 0
    due: dict[tuple[int, int], float] = {}
    events: list[tuple[float, int, int, Launch | None]] = []
    while (at_s := at_s + draw.expovariate(load * CAPACITY)) < 4.0:
        heapq.heappush(events, (at_s, number := number + 1, draw.randrange(fronts), None))
    while events:
        now_s, _, front, launch = heapq.heappop(events)
        dispatcher = dispatchers[front]
        if launch:
            dispatcher.completed(launch.id, now_s, {})
            in_time += sum(now_s <= due[front, ticket] for ticket in launch.tickets)
        elif not isinstance(ticket := dispatcher.admit(now_s, now_s + slo_s, Place("x", 0)), Refusal):
            admitted, due[front, ticket] = admitted + 1, now_s + slo_s
        for begun in dispatcher.tick(now_s):
            starts_s = max(now_s, free_s[begun.replica])
            free_s[begun.replica] = starts_s + ROUTE.stages[0].seconds(len(begun.tickets))
            heapq.heappush(events, (free_s[begun.replica], number := number + 1, front, begun))
    return in_time / admitted, in_time / (4.0 * CAPACITY)


def test_fronts_that_know_their_share_admit_inputs_that_are_in_time() -> None:
    kept, of_capacity = in_time_of_admitted(fronts=3, share=1 / 3, load=1.3)
    assert kept >= 0.97
    assert of_capacity >= 0.9


def test_a_lone_input_is_promised_a_lone_pass_whatever_the_share() -> None:
    whole, part = (Dispatcher(ROUTE, {"a": REPLICAS}, Limits(share=share)) for share in (1.0, 0.25))
    assert part.needed_s(0.0, inf) == whole.needed_s(0.0, inf)


def test_the_last_front_takes_over_the_shares_of_others() -> None:
    left, alone = (Dispatcher(ROUTE, {"a": REPLICAS}, Limits(share=share)) for share in (0.5, 1.0))
    left.limit(Limits())
    for dispatcher in (left, alone):
        for _ in range(100):
            dispatcher.admit(0.0, 10.0, Place("x", 0))
        dispatcher.tick(0.0)
    assert left.needed_s(0.0, inf) == alone.needed_s(0.0, inf)
    assert left.waiting() == alone.waiting()


def test_more_launches_wait_at_a_busy_replica_only_to_cover_the_next_transfer() -> None:
    group = Group("a", Limits(ahead=1))
    group.follow(["r"])
    replica = group.members["r"]
    for seconds in (0.010, 0.002):
        group.begin(replica, seconds, now_s=0.0)
    assert group.soonest() is None
    group.transfer_s = 0.001
    assert group.soonest() is None
    group.transfer_s = 0.005
    assert group.soonest() is replica
    group.begin(replica, 0.010, now_s=0.0)
    assert group.soonest() is None
