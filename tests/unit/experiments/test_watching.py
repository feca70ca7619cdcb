"""Whoever watches in `make bench-watching` asks what it should, as often as it should, and is noticed if it cannot."""

import time

import pytest

from experiments.watching import run
from isobatch.deployments.tracing import SAMPLER, tracing_here


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
