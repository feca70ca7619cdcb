"""Several fronts fill batches like one, if the first gets all inputs that it has room for (in virtual time)."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest

from isobatch.deployments.deployer.fronts import shares
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Launch, Limits, Place, Refusal
from isobatch.deployments.dispatch.route import Route
from tests.helpers.dispatcher_world import linear

ROUTE = Route((linear(0, 4, 8, "a", launch_s=0.02),))
REPLICAS = ["a1", "a2", "a3", "a4"]
CAPACITY = len(REPLICAS) * 8 / 0.02
SECONDS, TOLD_EVERY_S = 8.0, 1.0
Balance = Callable[[Sequence[int], random.Random], int]  # the front that a request goes to, by how many each has


@dataclass(frozen=True)
class Seen:
    fill: float
    p99_s: float
    in_time: float


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
    return Seen(float(np.mean(sizes)) / 8, float(np.percentile(kept, 99)), float((kept <= slo_s).mean()))


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
