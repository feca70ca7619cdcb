"""Stands for Ray's classes of metrics, and remembers what was told."""

from collections import defaultdict
from functools import partial
from typing import Any


class NotedMetrics:
    """`told[name][values of labels]`; of a histogram: how often each value was told."""

    def __init__(self) -> None:
        self.told: defaultdict[str, defaultdict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        self.Counter = self.Gauge = partial(_Noted, self.told)
        self.Histogram = self.Counter


class _Noted:
    def __init__(self, told: Any, name: str, _: str, *labels: Any) -> None:
        self._told, self._labels = told[name], labels[-1]

    def inc(self, more: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self._labels
        self._told[tuple(tags.values())] += more

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self._labels
        self._told[tuple(tags.values())] = value

    def observe(self, value: float) -> None:
        self._told[str(value),] += 1
