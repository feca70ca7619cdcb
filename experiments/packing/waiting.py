"""Compares packing with sorting waiting texts by length, which also pads little, in virtual time with measured times.

Each way serves the same texts at the highest rate that keeps the same p99.
"""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.packing.texts import Integers
from isobatch.cluster.load.workloads import arrivals

Waiting = list[tuple[int, float]]  # tokens and arrival time of each text, in order of arrival
Take = Callable[[Waiting], list[int]]  # the places of the texts of a launch
Seconds = Callable[[Sequence[int]], float]  # the time of a launch of texts of these lengths

SIZE = 16  # texts of a launch
TEXTS, STEPS = 4000, 14  # texts of a run, and halvings of the range of rates


def first_come(waiting: Waiting) -> list[int]:
    return list(range(min(SIZE, len(waiting))))


def by_length(waiting: Waiting) -> list[int]:
    """The launch of neighbours in length that pads least and contains the oldest text, so that no text starves.

    >>> by_length([(9, 0.0)] + [(3, 0.1)] * 20 + [(8, 0.2)] * 15)[:3]
    [21, 22, 23]
    """
    ordered = sorted(range(len(waiting)), key=lambda place: waiting[place][0])
    size, oldest = min(SIZE, len(ordered)), ordered.index(0)
    starts = range(max(0, oldest - size + 1), min(oldest, len(ordered) - size) + 1)
    tokens = np.array([waiting[place][0] for place in ordered])
    best = min(starts, key=lambda start: tokens[start + size - 1] * size - tokens[start : start + size].sum())
    return ordered[best : best + size]


def p99_s(rate: float, lengths: Integers, take: Take, seconds: Seconds) -> float:
    """The 99th percentile of one device's latencies, at Poisson arrivals."""
    times_s = arrivals("poisson", rate, TEXTS / rate, seed=1)
    tokens = np.random.default_rng(2).choice(lengths, len(times_s))
    coming: Waiting = list(zip(tokens.tolist(), times_s.tolist(), strict=True))[::-1]
    waiting, latencies, now_s = Waiting(), list[float](), 0.0
    while coming or waiting:
        if not waiting:
            now_s = max(now_s, coming[-1][1])
        while coming and coming[-1][1] <= now_s:
            waiting.append(coming.pop())
        chosen = set(take(waiting))
        launched = [waiting[place] for place in chosen]
        now_s += seconds([length for length, _ in launched])
        latencies += [now_s - came_s for _, came_s in launched]
        waiting = [each for place, each in enumerate(waiting) if place not in chosen]
    return float(np.quantile(latencies, 0.99))


def most_per_s(limit_s: float, lengths: Integers, take: Take, seconds: Seconds) -> float:
    """The highest rate at which 99 of 100 texts take no longer than this."""
    low, high = 0.0, SIZE / seconds([1] * SIZE)
    for _ in range(STEPS):
        rate = (low + high) / 2
        low, high = (rate, high) if p99_s(rate, lengths, take, seconds) <= limit_s else (low, rate)
    return low
