"""Reads what Ray tells Prometheus, as Prometheus would, or notes it without Ray."""

import urllib.request
from collections import defaultdict
from functools import partial
from typing import Any

from isobatch.deployments.metrics import MetricFamily

OF_SERVE = ("application", "deployment", "replica")  # labels that Serve adds to each series
ENDS = {"Counter": ("_total",), "Gauge": ("",), "Histogram": ("_bucket", "_sum", "_count")}


def scraped_names(family: MetricFamily) -> tuple[str, ...]:
    """Its names as Prometheus reads them from Ray."""
    return tuple(f"ray_{family.name}{end}" for end in ENDS[family.kind])


def scraped() -> dict[str, Any]:
    """Our metrics on the one node of the local Ray, by our names for them."""
    import ray
    from prometheus_client.parser import text_string_to_metric_families

    address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    text = urllib.request.urlopen(address, timeout=60).read().decode()
    families = text_string_to_metric_families(text)
    return {each.name.removeprefix("ray_"): each for each in families if each.name.startswith("ray_isobatch_")}


def check_family(family: MetricFamily, found: Any) -> None:
    """What was scraped has the type, the names and the labels that the table says."""
    assert found.type == family.kind.lower(), family.name
    for sample in found.samples:
        assert sample.name in scraped_names(family), sample.name
        assert sample.labels.keys() >= {*family.labels, *OF_SERVE}, sample


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
