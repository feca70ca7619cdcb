"""OpenAI's interface without Ray: the shape of answers and streams, and who goes away."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from isobatch.deployments.decoding import front
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.openai_api import COMPLETION_SHAPE, TextReply, stream_events, whole_texts
from isobatch.deployments.decoding.openai_requests import StreamOptions
from isobatch.deployments.decoding.scheduler import NewTokens, NoReplica, ReplicaFull
from isobatch.deployments.decoding.sequences import Finish, TextRequest, TextTerms
from isobatch.deployments.front.answers import RefusedError
from isobatch.profiles.errors import UserError
from tests.helpers.asking import eventually
from tests.helpers.decoder_world import CONFIG, World, events
from tests.helpers.documented import ask_examples, check_document
from tests.helpers.tiny_decoders import BLOCKS


def test_a_completion(world: World) -> None:
    reply = world.client().post("/v1/completions", json={"model": "tiny", "prompt": "47+85=", "max_tokens": 9})
    text, depths, count = world.plain("47+85=", 9)
    assert reply.status_code == 200
    answer = reply.json()
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["exit_blocks"]) == (text, depths)
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": count, "total_tokens": 6 + count}


def test_several_prompts_are_several_choices_whole_and_streamed(world: World) -> None:
    body = {"prompt": ["1+1=", "2+2=", "3+9="], "max_tokens": 7}
    plain = [world.plain(prompt, 7)[:2] for prompt in body["prompt"]]  # type: ignore[attr-defined]
    whole = world.client().post("/v1/completions", json=body).json()["choices"]
    assert [(each["text"], each["exit_blocks"]) for each in whole] == plain
    streamed = {index: ("", []) for index in range(3)}
    for event in events(world.client().post("/v1/completions", json=body | {"stream": True}).text):
        for each in event["choices"]:
            text, depths = streamed[each["index"]]
            streamed[each["index"]] = text + each["text"], depths + each["exit_blocks"]
    assert list(streamed.values()) == plain


def test_a_chat_streams_its_role_its_text_and_if_asked_its_usage(world: World) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "4 + 5"}]}], "stream": True}
    body |= {"max_completion_tokens": 6, "stream_options": {"include_usage": True}}
    chunks = events(world.client().post("/v1/chat/completions", json=body).text)
    text, _, count = world.plain("4+5=", 6)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in chunks[:-1]) == text
    assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == count
    assert [event["usage"] for event in chunks[:-1]] == [None] * (len(chunks) - 1), "as OpenAI's events"
    body["stream_options"] |= {"continuous_usage_stats": True}
    counting = events(world.client().post("/v1/chat/completions", json=body).text)
    written = [event["usage"]["completion_tokens"] for event in counting]
    assert (written, written[0], written[-1]) == (sorted(written), 0, count), "vLLM's option: the counts so far"
    without = events(world.client().post("/v1/chat/completions", json=body | {"stream_options": None}).text)
    assert not any("usage" in event for event in without)
    whole = world.client().post("/v1/chat/completions", json={**body, "stream": False, "stream_options": None}).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_text_usage_and_pages_however_tokens_are_grouped(world: World, stream: bool) -> None:
    text, depths, _ = world.plain("47+85=", 20)
    stop = text[3:5]
    end = next(count for count in range(1, 21) if stop in world.plain("47+85=", count)[0])
    body = {"prompt": "47+85=", "max_tokens": 20, "stop": [stop, "nothing"], "stream": stream}
    for group in (1, 3, 20):
        world.grouped = group
        reply = world.client().post(
            "/v1/completions", json=body | ({"stream_options": {"include_usage": True}} if stream else {})
        )
        chunks = events(reply.text) if stream else [reply.json()]
        choices = [event["choices"][0] for event in chunks if event["choices"]]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert [depth for choice in choices for depth in choice["exit_blocks"]] == depths[:end]
        assert choices[-1]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == end
    assert [written for _, written in world.front.meter.lengths] == [end] * 3
    eventually(lambda: world.engine.scheduler.pool.free == world.engine.scheduler.pool.count)


def test_a_t5_answers_a_completion_over_the_loss_of_replicas(world_of_t5: World) -> None:
    text, depths, count = world_of_t5.plain("47+85=", 12)
    world_of_t5.failing = 2
    answer = world_of_t5.client().post("/v1/completions", json={"prompt": "47+85=", "max_tokens": 12}).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["exit_blocks"]) == (text, depths)
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": count, "total_tokens": 6 + count}


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("completions", {"prompt": "1" * 65}, "the prompt has 65 tokens: the model's encoder reads 64"),
        ("completions", {"prompt": "1" * 64, "max_tokens": 64}, "max_tokens = 64: the model writes 63 at most"),
        ("chat/completions", {"messages": [{"role": "user", "content": "1+1"}]}, "has no chat template"),
    ],
)
def test_what_a_t5_cannot_do_is_said_in_one_sentence(world_of_t5: World, path: str, body: Any, sentence: str) -> None:
    world_of_t5.front.config = CONFIG.model_copy(update={"max_tokens": 100})
    reply = world_of_t5.client().post(f"/v1/{path}", json=body)
    assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (400, True), reply.text


class LostReplica:
    """Writes one token and is lost; the other replica is full so many times, each `full_for_s` long by the clock."""

    def __init__(self, world: World, times: int, full_for_s: float = 0.0) -> None:
        self._world, self._times, self._full_for_s = world, times, full_for_s
        self.asked: list[TextRequest] = []
        world.front.write_tokens = self.ask

    async def ask(self, request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        self.asked.append(request)
        if len(self.asked) == 1:
            yield NewTokens(1, (5,), (3,))
            raise ConnectionError
        if len(self.asked) < 2 + self._times:
            self._world.now_s += self._full_for_s
            raise ReplicaFull(0.01)
        yield NewTokens(1, (6, 7), (3, 3), Finish.LENGTH)

    async def text(self) -> str:
        request = self._world.front.request((1, 2), TextTerms(3))
        return "".join([piece.text async for piece in self._world.front.write(request, ())])


def test_a_text_that_is_begun_does_not_wait_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "RETRY_AFTER_S", 0.01)
    lost = LostReplica(world, times=100, full_for_s=front.MAX_WAIT_S / 3)
    with pytest.raises(RefusedError, match="too many"):
        asyncio.run(lost.text())
    assert len(lost.asked) == 1 + 3


def test_without_a_replica_a_text_is_refused_and_the_client_hears_when_to_come_again(world: World) -> None:
    async def ask(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        raise front.NoReplica(1.0)
        yield

    world.front.write_tokens = ask
    reply = world.client().post("/v1/completions", json={"prompt": "1+1="})
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "no replica is running; try again later")
    assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_not_let_in_is_told_when_to_come_again(world: World, stream: bool) -> None:
    world.full = True
    reply = world.client().post("/v1/completions", json={"prompt": "1+1=", "stream": stream})
    assert reply.status_code == 429
    assert 3 <= int(reply.headers["retry-after"]) <= 8  # clients that are refused together come back one by one
    assert reply.json()["error"]["type"] == "rate_limit_error"


def test_nobody_goes_on_with_the_other_texts_of_a_request_where_one_is_refused(world: World) -> None:
    cancelled = []

    async def ask(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        if request.max_tokens == 1:
            raise ReplicaFull(1.0)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.max_tokens)
            raise
        yield NewTokens(1, (5,), (3,))

    async def answer() -> None:
        requests = [world.front.request((1, 2), TextTerms(most)) for most in (3, 1, 2)]
        with pytest.raises(RefusedError, match="too many"):
            await whole_texts(world.front, TextReply(COMPLETION_SHAPE, "tiny", world.texts, requests, (), 0.0))
        assert sorted(cancelled) == [2, 3]

    world.front.write_tokens = ask
    asyncio.run(answer())


def test_a_text_is_ended_at_its_deadline(world: World) -> None:
    ended = []

    async def stall(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        try:
            yield NewTokens(1, (5,), (3,))
            await asyncio.Event().wait()
        finally:
            ended.append(request)

    def post(after_ms: str, **fields: Any) -> Any:
        body = {"prompt": "1+1=", **fields}
        return world.client().post("/v1/completions", json=body, headers={"X-Deadline-Ms": after_ms})

    assert post("60000").status_code == 200
    world.front.write_tokens = stall
    whole, streamed = post("50"), post("50", stream=True)
    assert (whole.status_code, whole.json()["error"]["type"]) == (504, "server_error")
    assert streamed.status_code == 200
    assert [list(each) for each in failed_events(streamed.text)][-1] == ["error"]
    assert "the deadline passed" in whole.text
    assert "the deadline passed" in streamed.text
    assert len(ended) == 2
    assert (post("soon").status_code, post("0").status_code) == (400, 400)
    assert world.front.meter.requests["refused"] == 4


def test_a_client_gets_the_full_networks_text(world: World) -> None:
    def post(**headers: str) -> Any:
        body = {"prompt": ["47+85=", "3+9="], "max_tokens": 9}
        return world.client().post("/v1/completions", json=body, headers=headers)

    result = post(**{"X-Full": "1", "X-Priority": "5"}).json()["choices"]
    full = [world.plain(prompt, 9, full=True)[:2] for prompt in ("47+85=", "3+9=")]
    assert [(each["text"], each["exit_blocks"]) for each in result] == full
    assert BLOCKS - 1 not in post().json()["choices"][0]["exit_blocks"]
    for wrong in ({"X-Full": "yes"}, {"X-Priority": "high"}):
        reply = post(**wrong)
        assert (reply.status_code, "it must be" in reply.text) == (400, True)


def test_a_trailer_does_not_replace_a_header(world: World) -> None:
    """uvicorn adds trailers after the headers."""
    headers = [("X-Deadline-Ms", "60000"), ("X-Deadline-Ms", "0")]
    assert world.client().post("/v1/completions", json={"prompt": "1+1="}, headers=headers).status_code == 200


def failed_events(body: str) -> list[Any]:
    """The events of a stream that ends with an error."""
    return [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line]


def test_a_stream_that_fails_ends_with_a_sentence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "RETRY_AFTER_S", 0.01)

    async def lose(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        yield NewTokens(1, (5,), (3,))
        raise ConnectionError

    world.front.write_tokens = lose
    body = {"prompt": "47+85=", "max_tokens": 9, "stream": True}
    first, *_, last = failed_events(world.client().post("/v1/completions", json=body).text)
    assert first["choices"]
    assert last["error"]["message"] == "this server failed: ConnectionError; its log says where"
    assert world.front.meter.requests == {"answered": 0, "refused": 0, "cancelled": 0, "failed": 1}


def test_a_key_is_asked_for_everywhere_but_where_health_is_told(world: World) -> None:
    client = world.client(b"secret")
    assert client.get("/healthz").status_code == 200
    assert client.get("/").url.path == "/docs"
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()["data"][0]["id"] == "tiny"


def test_a_page_that_is_allowed_asks_and_reads_the_answer(world: World) -> None:
    world.front.config = CONFIG.model_copy(update={"allowed_origins": ("https://shop.example",)})
    fields = {
        "json": {"prompt": "1+1=", "max_tokens": 1, "stream": True},
        "headers": {"Origin": "https://shop.example"},
    }
    reply = world.client().post("/v1/completions", **fields)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://shop.example")


def test_what_the_server_has_and_what_it_does_not(world: World) -> None:
    client = world.client()
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert client.get("/v1/models/other").status_code == 404
    assert "POST /v1/completions" in client.get("/v1/nothing").json()["error"]["message"]
    assert client.get("/stats").json()["requests"]["answered"] == 0
    assert client.get("/openapi.json").status_code == client.get("/docs").status_code == 200
    assert client.get("/").url.path == "/docs", "a browser at the address that was printed is shown something"


async def test_a_client_that_goes_at_the_last_event_has_its_answer(world: World) -> None:
    request = world.front.request(world.words("1+1=")["input_ids"], TextTerms(4))
    reply = TextReply(COMPLETION_SHAPE, "tiny", world.texts, [request], (), world.now_s)
    async with aclosing(stream_events(world.front, reply, StreamOptions())) as news:
        async for event in news:
            if b"[DONE]" in event:
                break
    counts = world.front.meter.requests
    assert (counts["answered"], counts["cancelled"]) == (1, 0)


async def test_a_request_whose_handler_is_cancelled_is_counted(world: World) -> None:
    async def handle() -> None:
        with world.front.counted():
            await asyncio.Event().wait()

    handling = asyncio.create_task(handle())
    await asyncio.wait([handling], timeout=0.01)
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling
    assert world.front.meter.requests["cancelled"] == 1


def test_the_interface_is_described_and_its_examples_are_answered(world: World) -> None:
    client = world.client()
    check_document(client.app.openapi())
    assert ask_examples(client, name="tiny") == 2 + 2 + 6


def test_what_cannot_be_done_fails_for_who_asked_and_decoding_goes_on(world: World) -> None:
    def follow_nothing(_: Engine) -> None:
        raise UserError("no ramp is known there")

    async def ask() -> None:
        with pytest.raises(UserError, match="no ramp"):
            await asyncio.wait_for(world.loop.call(follow_nothing), 60)
        with pytest.raises(NoReplica):
            await asyncio.wait_for(anext(world.loop.write(TextRequest((1,), 10**6))), 60)
        assert [group.finish async for group in world.loop.write(TextRequest((1,), 1))][-1]

    asyncio.run(ask())
    assert world.loop.alive


def test_when_decoding_fails_every_stream_does(world: World) -> None:
    def fail(_: Any) -> Any:
        raise MemoryError("no room")

    world.engine.network.run = fail  # type: ignore[method-assign]

    async def ask() -> None:
        async for _ in world.loop.write(TextRequest((1,), 1)):
            pass

    with pytest.raises(RuntimeError, match="decoding failed: no room"):
        asyncio.run(ask())
    eventually(lambda: not world.loop.alive)
    with pytest.raises(RuntimeError, match="decoding failed: no room"):
        asyncio.run(ask())
    with pytest.raises(RuntimeError, match="decoding failed: no room"):
        asyncio.run(asyncio.wait_for(world.loop.call(lambda engine: engine), 60))
