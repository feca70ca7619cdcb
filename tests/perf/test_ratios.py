"""What must not become slow, as ratios of processor time between two things in one run: a busy machine may run it."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from itertools import count

import numpy as np

from experiments.planner.settings import deep, evenly
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Launch, Limits, Place, Refusal
from isobatch.deployments.dispatch.route import Route
from isobatch.deployments.transport.packed import join, pack
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.profiles.model import Batch
from tests.helpers.dispatcher_world import linear

BATCH = 16


def cpu_s(*works: Callable[[], object], tries: int = 7) -> list[float]:
    """The least processor time of several tries of each: whatever disturbs makes it longer, never shorter.

    They take turns, so that whoever shares the processor's caches slows all of them.
    """
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(tries):
        for work, tries_s in zip(works, taken, strict=True):
            began_s = time.thread_time()
            work()
            tries_s.append(time.thread_time() - began_s)
    return [min(tries_s) for tries_s in taken]


def busy_dispatcher(inside: int) -> Callable[[], None]:
    """One step where so many wait: a batch arrives, a launch ends with half of its inputs surviving, others begin."""
    route = Route((linear(0, 2, BATCH, "first", survival=0.5), linear(2, 4, BATCH, "second", survival=0.5)))
    groups = {"first": ["a", "b"], "second": ["c"]}
    dispatcher = Dispatcher(route, groups, Limits(max_inside=10**6, stuck_after_s=1e6))
    now, running = count(), list[Launch]()

    def arrive(inputs: int, now_s: float) -> None:
        for row in range(inputs):
            assert not isinstance(dispatcher.admit(now_s, now_s + 1e6, Place(None, row)), Refusal)

    def step() -> None:
        now_s = 0.001 * next(now)
        arrive(BATCH, now_s)
        if running:
            ended = running.pop(0)
            staying = range(BATCH // 2) if ended.cursor == 0 else ()
            dispatcher.completed(ended.id, now_s, {row: Place(None, row) for row in staying})
        running.extend(dispatcher.tick(now_s))
        dispatcher.endings()

    def steps() -> None:
        for _ in range(20):
            step()

    arrive(inside, 0.0)
    return steps


def test_what_an_input_costs_the_dispatcher_does_not_depend_on_how_many_are_inside() -> None:
    few, many = cpu_s(busy_dispatcher(200), busy_dispatcher(20_000))
    assert many < 3 * few


def texts(count: int) -> Batch:
    lengths = 1 + np.arange(count) % 12
    hidden = np.ones((lengths.sum(), 64), np.float32)  # a row a token
    return Batch(2, {"hidden": hidden}, np.zeros((count, 2), np.float32), lengths)


def test_a_batch_is_packed_at_once_not_row_by_row() -> None:
    whole, rows = texts(64), [texts(1) for _ in range(64)]
    at_once, in_turn = cpu_s(lambda: pack(whole), lambda: [pack(row) for row in rows])
    assert at_once < in_turn / 8


def test_small_parts_are_joined_at_once_not_one_after_the_other() -> None:
    """Survivors come in small parts, and nothing is to be copied again for each that follows."""
    parts = [pack(texts(4)) for _ in range(32)]
    at_once, in_turn = cpu_s(lambda: join(parts), lambda: reduce(lambda joined, part: join([joined, part]), parts))
    assert at_once < in_turn / 4


def test_a_plan_takes_little_longer_where_devices_have_too_little_memory_for_large_batches() -> None:
    facts = deep(24).facts(evenly(80, 8))
    devices = tuple(replace(device, memory_bytes=int(device.memory_bytes / 5.5)) for device in facts.devices)
    works = (
        partial(side_by_side, each, Objective(slo_s=1.0), 0.01) for each in (facts, replace(facts, devices=devices))
    )
    roomy_s, tight_s = cpu_s(*works, tries=1)
    assert tight_s < 10 * roomy_s
