"""Several fronts over the same replicas, each with a dispatcher of its own that uses its share (in virtual time).

They fill batches like one, if the first gets all inputs that it has room for.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

import numpy as np
import pytest

from isobatch.deployments.deployer.fronts import shares
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.groups import Group
from isobatch.deployments.dispatch.messages import Launch, Limits, Place, Refusal
from isobatch.deployments.dispatch.route import Route
from tests.helpers.dispatcher_world import linear

ROUTE = Route((linear(0, 4, 8, "a", launch_s=0.02),))
REPLICAS = ["a1", "a2", "a3", "a4"]
CAPACITY = len(REPLICAS) * 8 / 0.02
SECONDS, TOLD_EVERY_S = 5.0, 1.0
Balance = Callable[[Sequence[int], random.Random], int]  # the front that a request goes to, by how many each has


@dataclass(frozen=True)
class Seen:
    fill: float
    p99_s: float
    in_time: float  # of those that were admitted
    goodput: float  # as a share of what the replicas can do


def first(room: int) -> Balance:
    """HAProxy's `balance first`: the first front that has room."""
    return lambda inside, _: next((front for front, has in enumerate(inside) if has < room), len(inside) - 1)


def played(fronts: int, balance: Balance, load: float, slo_s: float = 0.2) -> Seen:
    chance, numbers = random.Random(5), count()
    dispatchers = [Dispatcher(ROUTE, {"a": REPLICAS}, Limits(share=1 / fronts)) for _ in range(fronts)]
    events: list[tuple[float, int, str, int, Launch | None]] = []
    free_s = dict.fromkeys(REPLICAS, 0.0)
    at_s, began_s, took_s, sizes, came = 0.0, {}, list[float](), list[int](), [0] * fronts
    while (at_s := at_s + chance.expovariate(load * CAPACITY)) < SECONDS:
        heapq.heappush(events, (at_s, next(numbers), "request", 0, None))
    for second in range(1, int(SECONDS)):
        heapq.heappush(events, (second * TOLD_EVERY_S, next(numbers), "shares", 0, None))
    while events:
        now_s, _, what, front, launch = heapq.heappop(events)
        if launch:
            dispatchers[front].completed(launch.id, now_s, {})
            took_s += [now_s - began_s[front, ticket] for ticket in launch.tickets]
        elif what == "shares":
            dealt = shares({str(number): float(rate) for number, rate in enumerate(came)})
            for number, dispatcher in enumerate(dispatchers):
                dispatcher.limit(Limits(share=dealt[str(number)]))
            came = [0] * fronts
            continue
        else:
            front = balance([each.inside for each in dispatchers], chance)
            came[front] += 1
            if not isinstance(ticket := dispatchers[front].admit(now_s, now_s + slo_s, Place("x", 0)), Refusal):
                began_s[front, ticket] = now_s
        for begun in dispatchers[front].tick(now_s):
            sizes.append(len(begun.tickets))
            starts_s = max(now_s, free_s[begun.replica])
            free_s[begun.replica] = starts_s + ROUTE.stages[0].seconds(len(begun.tickets))
            heapq.heappush(events, (free_s[begun.replica], next(numbers), "end", front, begun))
    kept = np.array(took_s)
    good = kept <= slo_s
    goodput = float(good.sum()) / SECONDS / CAPACITY
    return Seen(float(np.mean(sizes)) / 8, float(np.percentile(kept, 99)), float(good.mean()), goodput)


@pytest.mark.parametrize("fronts", [2, 4])
def test_at_half_load_the_first_front_fills_batches_as_one_does(fronts: int) -> None:
    one, several = played(1, first(10**6), 0.5), played(fronts, first(10**6), 0.5)
    assert several.fill >= 0.95 * one.fill
    assert several.p99_s <= 1.05 * one.p99_s


@pytest.mark.parametrize("fronts", [2, 4])
@pytest.mark.parametrize("load", [0.5, 0.9, 1.3])
def test_inputs_beyond_the_first_front_s_room_are_answered_in_time_too(fronts: int, load: float) -> None:
    """A front that can take no more than a part of the work: shares follow, and promises are kept."""
    seen = played(fronts, first(round(0.6 * load * CAPACITY * 0.03)), load)
    assert seen.in_time >= 0.97


def test_fronts_that_get_requests_by_chance_admit_inputs_that_are_in_time() -> None:
    seen = played(3, lambda inside, chance: chance.randrange(len(inside)), load=1.3, slo_s=0.15)
    assert seen.in_time >= 0.97
    assert seen.goodput >= 0.9


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
