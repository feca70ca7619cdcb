"""Whoever watches in `make bench-watching` asks what it should, as often as it should, and is noticed if it cannot."""

import http.server
import io
import random
import threading
import time
from collections.abc import Iterator
from math import log

import numpy as np
import pytest
from rich.console import Console

from cluster.load.generator import LoadRecord
from deployments.tracing import PARENT, SAMPLER, TraceSampling, tracing_here
from experiments.watching import run


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """It knows one path, and remembers what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404 if "nowhere" in self.path else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()
        thread.join()


def test_an_open_page_asks_for_counts_and_the_controller(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = server
    monkeypatch.setattr(run, "PAGE_EVERY_S", 0.01)
    with run.page(url):
        until_s = time.monotonic() + 60
        while len(asked) < 6 and time.monotonic() < until_s:
            time.sleep(0.01)
    assert asked[:4] == ["/stats", "/controller/status"] * 2
    seen = len(asked)
    time.sleep(0.05)
    assert len(asked) == seen, "it ends with its turn"


def test_who_is_not_answered_is_no_watcher(server: tuple[str, list[str]]) -> None:
    url, asked = server
    watching = run._asking((f"{url}/nowhere",), 10.0)
    watching.__enter__()
    while not asked:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="404"):
        watching.__exit__(None, None, None)


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


def test_requests_that_are_not_watched_are_not_traced() -> None:
    name, told = run.UNTRACED.strip().split(": ")
    sampling = TraceSampling.read(run._traced("http://127.0.0.1:4318"))
    assert not sampling.takes(told, chance=lambda: 0.0)
    assert (name, sampling.takes(None, chance=lambda: 0.0)) == (PARENT, True)
    assert sampling.share == pytest.approx(run.OFTEN * TraceSampling.read({}).share)


def test_the_load_of_a_traced_turn_runs_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it takes until as many spans are sent as are made."""
    loads: list[tuple[str, float]] = []

    class Load:
        def __init__(self, url: str, bodies: object, clients: int, headers: str) -> None:
            self.headers = headers

        async def by_clients(self, clients: int, seconds: float) -> LoadRecord:
            loads.append((self.headers, seconds))
            times_s = np.linspace(0.0, seconds, 50)
            ended_s = times_s + 0.001  # the last one after it
            return LoadRecord(times_s, times_s, times_s, ended_s, np.full(50, 200), times_s)

    monkeypatch.setattr(run, "LoadGenerator", Load)
    monkeypatch.setattr(run, "_digits", lambda: [b"{}"])
    monkeypatch.setattr(run.servers, "processor_s", iter((1.0, 2.0)).__next__)
    way = run.WAYS["tracing"]
    assert way.settles_s > 0
    found = run.turn(way, "http://nobody", seconds=2.0, settles_s=way.settles_s)
    assert (found.rps, found.work_s) == pytest.approx((49 / 2, 1 / 49))
    assert loads == [("", way.settles_s), ("", 2.0)]


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "console", Console(file=(said := io.StringIO()), width=200))
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert set(run.measurable()) == {"page", "metrics"}
    assert "tracing is NOT measured: pip install 'isobatch[tracing]'" in said.getvalue()
    monkeypatch.setattr(run, "find_spec", lambda name: name)
    assert run.measurable() == run.WAYS


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


def test_a_bench_that_is_broken_off_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), run.collector():
        raise KeyboardInterrupt
    assert set(threading.enumerate()) <= before
