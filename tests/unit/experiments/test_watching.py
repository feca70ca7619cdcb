"""Whoever watches in `make bench-watching` asks what it should, as often as it should, and is noticed if it cannot."""

import random
import time
from math import log

import pytest

from deployments.tracing import SAMPLER, tracing_here
from experiments.watching import run


def test_what_changes_slowly_is_in_no_comparison() -> None:
    """A machine that gets slower from turn to turn, and takes 2 % more for each request that is watched."""
    every = [run.Turn(1000.0 - number, 0.001) for number in range(5)]
    watched = [run.Turn(0.98 * each.rps, each.work_s / 0.98) for each in every]
    found = [run.compared(every[at - 1], watched[at], every[at + 1]) for at in (1, 3)]
    figures = run.ratios("page", found)
    assert figures["page_rps_ratio"] == pytest.approx(0.98)
    assert figures["page_work_ratio"] == pytest.approx(0.98)
    assert figures["page_comparisons"] == 2


def test_who_watches_more_often_than_usual_is_charged_for_less() -> None:
    nobody = run.Turn(1000.0, 0.001)
    assert run.compared(nobody, run.Turn(900.0, 0.001), nobody, often=5).rps == pytest.approx(0.98)


def test_the_interval_has_the_median_as_often_as_it_says() -> None:
    chance = random.Random(1)
    kept = 0
    for _ in range(1000):
        low, high = run.interval([chance.expovariate(1.0) for _ in range(15)])
        kept += low <= log(2) <= high
    assert kept >= 950 - 3 * 7  # at least 95 %; three standard errors


def test_spans_come_to_the_collector_as_opentelemetry_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTLP over HTTP by OpenTelemetry's own exporter, read by the messages of its protocol."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with run.collector() as (url, came):
        for name, value in {**run._traced(url), SAMPLER: "always_on", "OTEL_SERVICE_NAME": "shop"}.items():
            monkeypatch.setenv(name, value)
        tracing = tracing_here(time.perf_counter)
        assert tracing
        with tracing.request("predict", {}) as request:
            tracing.span("queue", request, about={"block": 2}).end()
        tracing.close()
    (resource,) = ExportTraceServiceRequest.FromString(came[0]).resource_spans
    told = {each.key: each.value.string_value for each in resource.resource.attributes}
    queue, asked = resource.scope_spans[0].spans
    assert told["service.name"] == "shop"
    assert (queue.name, asked.name) == ("queue", "request predict")
    assert (queue.trace_id, queue.parent_span_id) == (asked.trace_id, asked.span_id)
    assert queue.attributes[0].key == "isobatch.block"
