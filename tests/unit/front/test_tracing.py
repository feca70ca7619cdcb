"""The spans of a request, which requests are traced, and that none is by default."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.service import Service
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.tracing import TraceSampling, Tracing, part_of, span_of_request, tracing_here
from isobatch.deployments.transport.orders import Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.errors import UserError
from tests.helpers.toy_model import Toy

TRACE, CALLER = "1" * 32, "2" * 16
WANTED, UNWANTED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"
TOY = AppConfig(model="/models/toy", loader="tests.helpers.toy_model:load", slo_ms=60_000)


class Seen:
    """Tracing that keeps what it makes."""

    def __init__(self, share: float = 0.0) -> None:
        self._exporter = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self._exporter)
        self.tracing = Tracing(TraceSampling(share, parent_based=True), processor, time.perf_counter)

    def spans(self, name: str = "") -> list[Any]:
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith(name)]

    def one(self, name: str) -> Any:
        """Its only span of this name. A launch may still be ending when its inputs have been answered."""
        until_s = time.monotonic() + 60
        while not self.spans(name) and time.monotonic() < until_s:
            time.sleep(0.001)
        (span,) = self.spans(name)
        return span


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def client(seen: Seen) -> Iterator[TestClient]:
    service = Service(TOY, time.perf_counter)
    service._tracing = seen.tracing
    with TestClient(create_api(service)) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {"inputs": [0, 3]}),
        ("/v2/models/toy/infer", {"inputs": [{"shape": [1, 2], "datatype": "INT32", "data": [0, 3]}]}),
    ],
)
def test_a_request_that_its_caller_traces_has_spans(client: TestClient, seen: Seen, path: str, body: Any) -> None:
    reply = client.post(path, json=body, headers={"traceparent": WANTED, "X-Request-Id": "order 7"})
    request, queue, launch = seen.one("request"), seen.one("queue"), seen.one("launch")
    assert {format(span.context.trace_id, "032x") for span in (request, queue, launch)} == {TRACE}
    assert format(request.parent.span_id, "016x") == CALLER
    assert queue.parent.span_id == launch.parent.span_id == request.context.span_id
    assert request.start_time <= queue.start_time <= queue.end_time <= launch.start_time <= launch.end_time
    assert launch.start_time <= request.end_time
    assert launch.attributes["isobatch.inputs"] == 1
    assert request.attributes["isobatch.request_id"] == "order 7"
    if path == "/predict":
        assert reply.headers["traceparent"] == f"00-{TRACE}-{request.context.span_id:016x}-01"


@pytest.mark.parametrize("headers", [{}, {"traceparent": UNWANTED}, {"traceparent": "nonsense"}])
def test_others_are_not_traced(client: TestClient, seen: Seen, headers: dict[str, str]) -> None:
    reply = client.post("/predict", json={"inputs": [0, 3]}, headers=headers)
    assert (reply.status_code, "traceparent" in reply.headers, seen.spans()) == (200, False, [])


def test_errors_are_in_the_span(client: TestClient, seen: Seen) -> None:
    assert client.post("/predict", json={"inputs": [0, -1]}, headers={"traceparent": WANTED}).status_code == 500
    assert not seen.one("request").status.is_ok
    assert all(not span.status.is_ok for span in seen.spans("launch"))
    assert seen.spans("launch")


async def test_requests_of_one_launch_are_linked(seen: Seen) -> None:
    sent: list[str] = []

    class Workers(LocalWorkers):
        def run(self, replica: str, order: Order) -> Any:
            sent.append(order.trace)
            return super().run(replica, order)

    route = Route((Stage(0, 2, 4, "all", (0.001,) * 4), Stage(2, 4, 4, "all", (0.001,) * 4)))
    driver = Driver(Dispatcher(route, {"all": ["r"]}), Workers({"r": SplitReplica(Toy())}), time.perf_counter)

    async def ask(traceparent: str) -> None:
        headers = {b"traceparent": traceparent.encode()}
        with span_of_request(seen.tracing, "predict", headers):
            await driver.answer(pack(Toy().encode([[3, 1], [3, 2]])), 60.0)

    await asyncio.gather(ask(WANTED), ask(WANTED.replace("1" * 32, "3" * 32)), ask(UNWANTED))
    await driver.close()
    launches = seen.spans("launch")
    assert [span.attributes["isobatch.block"] for span in launches] == [0, 2]
    assert [len(span.links) for span in launches] == [1, 1], "two requests fill a launch of four inputs"
    assert len(seen.spans("queue")) == 8, "four inputs that are traced, in two launches each"
    assert [each for each in sent if each] == [
        f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01" for span in launches
    ]


def test_a_span_says_what_opentelemetrys_own_would(seen: Seen) -> None:
    """Made without its tracer, a span differs from the tracer's only in its numbers and times."""
    tracer = TracerProvider(resource=Resource.create({"service.name": "isobatch"})).get_tracer("isobatch")
    parent = SpanContext(int(TRACE, 16), int(CALLER, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    linked = seen.tracing.span("request predict", WANTED)
    theirs = tracer.start_span(
        "launch",
        set_span_in_context(NonRecordingSpan(parent), Context()),
        SpanKind.PRODUCER,
        {"isobatch.block": 2, "isobatch.group": "gpu"},
        [Link(linked.context)],
    )
    theirs.set_status(Status(StatusCode.ERROR, "ValueError: broken"))
    theirs.end()
    ours = seen.tracing.span("launch", WANTED, "PRODUCER", links=[linked], about={"block": 2, "group": "gpu"})
    ours.failed(ValueError("broken"))
    ours.end()

    def said(span: Any) -> dict[str, Any]:
        printed: dict[str, Any] = json.loads(span.to_json())
        for different in ("span_id", "start_time", "end_time"):
            (printed["context"] if different == "span_id" else printed).pop(different)
        return printed | {"scope": span.instrumentation_scope.name, "remote": span.parent.is_remote}

    assert said(seen.one("launch")) == said(theirs)


def test_a_replica_continues_the_trace_of_its_order(seen: Seen) -> None:
    with seen.tracing.request("predict", {b"traceparent": WANTED.encode()}) as request:
        order = Order(4, frozenset(), (), trace=request.traceparent)
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order)
    with part_of(seen.tracing, received.trace, "hop", {"parts": 2}):
        pass
    with pytest.raises(RuntimeError), part_of(seen.tracing, received.trace, "compute"):
        raise RuntimeError("broken")
    with part_of(seen.tracing, "", "hop"), part_of(None, received.trace, "hop"):
        pass
    hop, compute = seen.one("hop"), seen.one("compute")
    assert hop.parent.span_id == compute.parent.span_id == seen.one("request").context.span_id
    assert (hop.status.is_ok, compute.status.is_ok) == (True, False)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "isobatch"),
        ({"OTEL_SERVICE_NAME": "reviews"}, "reviews"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=films"}, "films"),
    ],
)
def test_spans_name_their_service(environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    seen = Seen()
    seen.tracing.span("launch", None).end()
    assert seen.one("launch").resource.attributes["service.name"] == name


def test_the_configured_share_of_requests_is_traced() -> None:
    numbers = iter(range(10_000))
    assert sum(TraceSampling(0.01, True).samples(None, lambda: next(numbers) / 10_000) for _ in range(10_000)) == 100
    assert TraceSampling(1.0, parent_based=False).samples(UNWANTED)
    assert not TraceSampling(0.0, parent_based=False).samples(WANTED)


@pytest.mark.parametrize("parent_based", [True, False])
def test_a_request_belongs_to_the_trace_of_its_caller(parent_based: bool) -> None:
    """As with OpenTelemetry's own samplers, which choose the requests to trace, and not their ids."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(TraceSampling(1.0, parent_based), SimpleSpanProcessor(exporter), time.perf_counter)
    with tracing.request("predict", {b"traceparent": WANTED.encode()}):
        pass
    (span,) = exporter.get_finished_spans()
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, CALLER)


@pytest.mark.parametrize(
    "header",
    [
        f"00-{32 * '0'}-{16 * '2'}-01",
        f"00-{32 * '1'}-{16 * '0'}-01",
        f"ff-{32 * '1'}-{16 * '2'}-01",
        f"00-{32 * '1'}-{16 * '2'}-01more",
    ],
)
def test_a_header_that_names_no_span_counts_as_none(seen: Seen, header: str) -> None:
    """Some proxies send zeros. All their requests would be one trace, of number 0."""
    assert not TraceSampling(0.0, True).samples(header)
    assert TraceSampling(1.0, True).samples(header)
    span = seen.tracing.span("request", header)
    assert (span.parent, span.context.trace_id > 0) == (None, True)


def test_it_is_off_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing_here(time.perf_counter, {}) is None
    assert tracing_here(time.perf_counter, {"OTEL_TRACES_EXPORTER": "none"}) is None
    on = {"OTEL_TRACES_EXPORTER": "console"}
    assert tracing_here(time.perf_counter, on | {"OTEL_SDK_DISABLED": "true"}) is None
    made = tracing_here(time.perf_counter, on | {"OTEL_TRACES_SAMPLER_ARG": "0.5"})
    assert made
    assert made.sampling == TraceSampling(0.5, parent_based=True)
    made.close()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin': there are: none, otlp, console"),
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "'sometimes': there are: always_on"),
        ({"OTEL_TRACES_SAMPLER_ARG": "two"}, "'two': it must be a share, from 0 to 1"),
    ],
)
def test_a_wrong_variable_is_one_sentence(wrong: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        tracing_here(time.perf_counter, {"OTEL_TRACES_EXPORTER": "console"} | wrong)


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "-1"), ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000")]
)
def test_a_limit_that_opentelemetry_refuses_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with pytest.raises(UserError, match=f"{name}={value}: "):
        tracing_here(time.perf_counter)
