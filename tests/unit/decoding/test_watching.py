"""What a decoder tells of itself: metrics of its front and its replicas, and spans of requests and sequences."""

import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from experiments.demos.sums import tokenizer
from isobatch.deployments.decoding.anatomy import DecoderShape
from isobatch.deployments.decoding.client_meter import ClientMeter
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.front import DecoderFront
from isobatch.deployments.decoding.openai_api import create_decoder_api
from isobatch.deployments.decoding.replica import ReplicaState, export, traced
from isobatch.deployments.decoding.scheduler import NewTokens, ReplicaFull
from isobatch.deployments.decoding.sequences import Finish, TextRequest
from isobatch.deployments.decoding.texts import TextTokens
from isobatch.deployments.front.proxy import Burden, ProxyLimit, Refusals
from isobatch.deployments.metrics import TEXT_FRONT, TEXT_REPLICA, MetricSeries
from isobatch.deployments.tracing import TraceSampling, Tracing, current
from tests.helpers.scraping import NotedMetrics

TRACE, CALLER = "1" * 32, "2" * 16
TRACED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
ASKED = {"prompt": "1+1=", "max_tokens": 4}
_SCENE = (  # what one sequence writes: seconds until then, tokens
    (0.25, (5,)),
    (0.03, (6, 7)),
    (0.03, (8,)),
)


class Scene:
    """A front whose replica writes as `_SCENE` says, by a clock of its own."""

    def __init__(self) -> None:
        self.now_s, self.full, self.fails, self.traces = 0.0, False, False, list[str]()
        self.noted, self.exporter = NotedMetrics(), InMemorySpanExporter()
        processor = SimpleSpanProcessor(self.exporter)
        self.tracing = Tracing(TraceSampling(0.0, parent_based=True), processor, time.perf_counter)
        meter = ClientMeter(MetricSeries(TEXT_FRONT, self.noted), lambda: self.now_s, 0.2, 0.05)
        config, texts = DecoderConfig(model="/models/tiny"), TextTokens(tokenizer(), 64)
        shape = DecoderShape(num_blocks=4, vocabulary=23, heads=2, width=6, reads=64)
        self.front = front = DecoderFront(config, "tiny", shape, texts, frozenset([0]), self.ask, meter, self.stats)
        front.tracing = self.tracing
        api = create_decoder_api(front)
        self.client = TestClient(api, raise_server_exceptions=False)

    async def ask(self, _: TextRequest) -> AsyncGenerator[NewTokens, None]:
        span = current()
        self.traces.append(span.traceparent if span else "")
        if self.full:
            raise ReplicaFull(1.0)
        for place, (wait_s, tokens) in enumerate(_SCENE):
            self.now_s += wait_s
            last = place + 1 == len(_SCENE)
            yield NewTokens(1, tokens, (3,) * len(tokens), Finish.LENGTH if last else None)

    async def stats(self) -> dict[str, Any]:
        return {}

    def spans(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())

    def told(self, name: str) -> dict[tuple[str, ...], float]:
        return dict(self.noted.told[name])


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_requests_that_a_proxy_refuses_are_counted_without_another_question(scene: Scene) -> None:
    refusals = Refusals()
    scene.front.proxies.watch(ProxyLimit(Path("none"), scene.front.burden, list, refusals=refusals))
    refusals.add("front", 0)
    refusals.add("front", 7)
    assert scene.client.post("/v1/completions", json=ASKED).status_code == 200
    assert scene.told("isobatch_requests") == {("answered",): 1, ("refused",): 7}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_counted_and_its_tokens_are_timed(scene: Scene, stream: bool) -> None:
    assert scene.client.post("/v1/completions", json=ASKED | {"stream": stream}).status_code == 200
    assert scene.told("isobatch_requests") == {("answered",): 1}
    assert scene.told("isobatch_prompt_tokens") == scene.told("isobatch_written_tokens") == {(): 4}
    assert scene.told("isobatch_ttft_ms") == {("250.0",): 1}
    ((between_ms,),) = scene.told("isobatch_tpot_ms")
    assert float(between_ms) == pytest.approx(20), "three tokens in 60 ms after the first"
    ((took_ms,),) = scene.told("isobatch_latency_ms")
    assert float(took_ms) == pytest.approx(310)


def test_the_lengths_of_texts_are_those_that_were_written_whole(scene: Scene) -> None:
    for body in (ASKED, ASKED | {"prompt": "12+34="}, ASKED | {"stop": "2"}):
        assert scene.client.post("/v1/completions", json=body).status_code == 200
    scene.full = True
    scene.client.post("/v1/completions", json=ASKED)
    prompts, outputs = zip(*scene.front.meter.lengths, strict=True)
    assert prompts == (4, 6, 4)
    assert outputs[:2] == (4, 4)


def test_the_controller_is_told_tokens_by_their_depth_and_how_many_were_in_time(scene: Scene) -> None:
    """Due are 200, 250, 300 and 350 ms; they come after 250, 280, 280 and 310."""
    for _ in range(2):
        assert scene.client.post("/v1/completions", json=ASKED).status_code == 200
    scene.full = True
    scene.client.post("/v1/completions", json=ASKED)
    seen = scene.front.meter.observed(num_blocks=4)
    assert (seen.exits, seen.in_time, seen.texts, seen.ended) == ((0, 0, 0, 8), 2 * 2, 2, 8)
    assert seen.arrivals == seen.arrived_weight == 12, "who was refused would have become as long as the others"
    assert seen.lengths == ((4, 4), (4, 4))
    assert seen.seconds == pytest.approx(scene.now_s)


def test_counts_begin_by_the_clock_that_fronts_and_controllers_share(scene: Scene) -> None:
    meter = ClientMeter(MetricSeries(TEXT_FRONT, scene.noted), lambda: scene.now_s, 0.2, 0.05, now_s=1e9)
    scene.now_s += 3.0
    seen = meter.observed(num_blocks=4)
    assert (seen.started_s, seen.seconds) == (1e9, 3.0)


@pytest.mark.parametrize("prompt", [ASKED["prompt"], ["1+2=", "12+3=", "4+5="]])
@pytest.mark.parametrize(("ttft_s", "burden"), [(0.2, Burden(0, 1, 0)), (1.0, Burden(0, 0, 1))])
def test_haproxy_hears_of_strained_ones(scene: Scene, ttft_s: float, burden: Burden, prompt: str | list[str]) -> None:
    """The first token comes after 250 ms. A request of several texts has one place at HAProxy, too."""
    meter = ClientMeter(MetricSeries(TEXT_FRONT, scene.noted), lambda: scene.now_s, ttft_s, 0.05)
    scene.front.meter = meter
    assert scene.client.post("/v1/completions", json=ASKED | {"prompt": prompt}).status_code == 200
    assert meter.burden() == burden
    scene.full = True
    assert scene.client.post("/v1/completions", json=ASKED).status_code == 429
    assert meter.burden() == burden._replace(strained=burden.strained + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_its_caller_traces_has_a_span_until_its_last_word(scene: Scene, stream: bool) -> None:
    with scene.client as client:  # it starts, and sends what is left when it ends
        reply = client.post("/v1/completions", json=ASKED | {"stream": stream}, headers=TRACED)
    (span,) = scene.spans()
    assert (span.name, format(span.context.trace_id, "032x")) == ("request completion", TRACE)
    assert format(span.parent.span_id, "016x") == CALLER
    assert reply.headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert scene.traces == [reply.headers["traceparent"]], "the replica is told"


async def test_a_replica_divides_a_sequence_at_its_first_token(scene: Scene) -> None:
    async def groups(*written: NewTokens) -> AsyncGenerator[NewTokens, None]:
        for each in written:
            yield each

    first, last = NewTokens(1, (5,), (3,)), NewTokens(1, (6,), (3,), Finish.LENGTH)
    request, trace = TextRequest((1, 2), 4), TRACED["traceparent"]
    for written in ((first, last), (last,)):
        pieces = traced(groups(*written), request, scene.tracing, trace)
        assert [each async for each in pieces] == [*written]
    assert [span.name for span in scene.spans()] == ["first token", "further tokens", "first token"]
    assert dict(scene.spans()[0].attributes) == {"isobatch.prompt_tokens": 2}
    assert {format(span.context.trace_id, "032x") for span in scene.spans()} == {TRACE}


def test_a_replica_tells_what_it_has_done_and_what_is_on_it() -> None:
    noted = NotedMetrics()
    series = MetricSeries(TEXT_REPLICA, noted)
    export(series, ReplicaState(3, 1, 10, 40, 0, 0.0, {1: 5}, {0: (4, 12, 32)}))
    export(
        series, ReplicaState(2, 0, 15, 40, 1, 0.0, {1: 7, 5: 2}, {0: (6, 16, 48), 2: (1, 2, 8)}, asked=30, shared=12)
    )
    fields = {name: dict(result) for name, result in noted.told.items()}
    assert fields["isobatch_exits"] == {("1",): 7, ("5",): 2}
    assert fields["isobatch_launches"] == {("decoder", "0"): 6, ("decoder", "2"): 1}
    assert fields["isobatch_launched_inputs"] == {("decoder", "0"): 16, ("decoder", "2"): 2}
    assert fields["isobatch_launched_room"] == {("decoder", "0"): 48, ("decoder", "2"): 8}
    assert fields["isobatch_pages"] == {("used",): 25, ("free",): 15}
    assert (fields["isobatch_residents"], fields["isobatch_preempted"]) == ({(): 2}, {(): 1})
    assert fields["isobatch_waiting_inputs"] == {("decoder", "0"): 0}
    assert fields["isobatch_prefix_positions"] == {("shared",): 12, ("read",): 18}
