"""Texts over gRPC: Triton's own client gets what HTTP gives, piece by piece or whole, and the same sentences."""

import asyncio
import queue
import socket
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from experiments.shared.machine import free_port
from isobatch.deployments.decoding.grpc_texts import serving
from isobatch.deployments.decoding.scheduler import NewTokens
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.decoding.texts import TextTokens
from isobatch.deployments.front.open_inference.messages import message
from tests.helpers.decoder_world import CONFIG, World
from tests.helpers.grpc_proxy import STREAM, frame, headers

triton = pytest.importorskip("tritonclient.grpc")
NINE = {"max_tokens": 9}


@pytest.fixture(autouse=True)
def served(world: World) -> None:
    world.front.config = CONFIG.model_copy(update={"grpc_port": free_port()})


def play(world: World, scene: Callable[[Any], Any]) -> Any:
    """What a client gets that asks while the front serves."""

    def ask() -> Any:
        with triton.InferenceServerClient(f"127.0.0.1:{world.front.config.grpc_port}") as client:
            return scene(client)

    async def act() -> Any:
        async with serving(world.front):
            return await asyncio.wait_for(asyncio.to_thread(ask), 60)

    return asyncio.run(act())


def text(value: Any, name: str = "text_input", kind: str = "BYTES") -> Any:
    tensor = triton.InferInput(name, [1], kind)
    tensor.set_data_from_numpy(np.array([value], dtype=object if kind == "BYTES" else bool))
    return tensor


def said(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


def streamed(client: Any, *requests: dict[str, Any], **options: Any) -> dict[str, list[Any]]:
    """Responses, or what went wrong, by the id of their request, up to the last of each."""
    news: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: news.put(error or result), **options)
    for number, fields in enumerate(requests):
        client.async_stream_infer(**({"model_name": "tiny", "request_id": str(number)} | fields))
    by_name: dict[str, list[Any]] = {}
    ended = 0
    while ended < len(requests):
        one = news.get(timeout=30)
        if not hasattr(one, "get_response"):
            by_name.setdefault("", []).append(one)
            ended += 1
            continue
        reply = one.get_response()
        by_name.setdefault(reply.id, []).append(one)
        ended += reply.parameters["triton_final_response"].bool_param
    client.stop_stream()
    return by_name


def test_a_whole_text_is_what_http_gives(world: World) -> None:
    replies = play(world, lambda client: client.infer("tiny", [text("47+85=")], request_id="7", parameters=NINE))
    plain, depths, _ = world.plain("47+85=", 9)
    assert (said(replies), replies.as_numpy("exit_block").tolist()) == (plain, depths)
    assert replies.as_numpy("finish_reason")[0].decode() in ("stop", "length")
    assert replies.get_response().id == "7"
    assert world.front.meter.requests["answered"] == 1


def test_a_stream_has_the_tokens_as_they_come_of_all_its_requests_together(world: World) -> None:
    world.grouped = 1  # or a busy machine may have all tokens before the front looks
    prompts = ["1+1=", "2+2=", "3+9="]
    requests = [{"inputs": [text(prompt)], "parameters": NINE} for prompt in prompts]
    replies = play(world, lambda client: streamed(client, *requests))
    for number, prompt in enumerate(prompts):
        pieces = replies[str(number)]
        plain, depths, _ = world.plain(prompt, 9)
        assert "".join(map(said, pieces)) == plain
        assert np.concatenate([piece.as_numpy("exit_block") for piece in pieces]).tolist() == depths
        assert len(pieces) > 1


def test_what_triton_says_of_sampling_is_understood_and_a_text_may_come_as_one(world: World) -> None:
    sampling = text('{"max_tokens": 9, "temperature": 0}', "sampling_parameters")
    inputs = [text("47+85="), sampling, text(False, "stream", "BOOL")]
    (one,) = play(world, lambda client: streamed(client, {"inputs": inputs}))["0"]
    assert said(one) == world.plain("47+85=", 9)[0]


@pytest.mark.parametrize("whole", [True, False])
def test_the_time_to_the_first_token_counts_from_the_arrival(world: World, whole: bool) -> None:
    class Slow(TextTokens):
        async def prompt(self, text: str, **options: bool) -> tuple[int, ...]:
            world.now_s += 100.0
            return await super().prompt(text, **options)

    requested_s, write = list[float](), world.front.write_tokens

    def noted(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        requested_s.append(request.requested_s)
        return write(replace(request, requested_s=0.0))

    world.front.texts, world.front.write_tokens = Slow(world.words, 64), noted
    body = {"inputs": [text("1+1=")], "parameters": NINE}
    play(world, lambda client: client.infer("tiny", **body) if whole else streamed(client, body))
    assert requested_s[0] < time.time() - 99


WRONG = (
    ({"model_name": "other"}, "there is no model 'other' in version '1': this is 'tiny', '1'"),
    ({"model_version": "2"}, "there is no model 'tiny' in version '2'"),
    ({"parameters": {"max_tokens": 41}}, "max_tokens = 41: 40 are allowed"),
    ({"parameters": {"max_tokens": -1}}, "max_tokens = -1:"),
    ({"parameters": {"best": 1}}, "best is not served; there are:"),
    ({"parameters": {"model": "other"}}, "model = 'other': this server has tiny"),
    ({"parameters": {"n": 2}}, "n = 2: over gRPC it is not served, over HTTP it is"),
    ({"parameters": {"prompt": "2+2="}}, "prompt is not a parameter: it is given as the tensor text_input"),
    ({"inputs": [text("1+1="), text('{"prompt": "2+2="}', "sampling_parameters")]}, "prompt is not a parameter"),
    ({"parameters": {"text_input": "2+2="}}, "text_input is not a parameter: it is given as the tensor text_input"),
    ({"inputs": [text('{"text_input": [1, 2]}', "sampling_parameters")]}, "text_input is not a parameter"),
    ({"parameters": {"echo": True}}, "echo = True: over gRPC it is not served"),
    ({"parameters": {"logprobs": 1}}, "logprobs = 1: over gRPC it is not served"),
    ({"inputs": [text("1+1="), text('{"temperature": 3.5}', "sampling_parameters")]}, "temperature = 3.5:"),
    ({"inputs": [text("", "prompt")]}, "there is no input 'prompt'; there are: text_input"),
    ({"inputs": [text("{}", "sampling_parameters")]}, "the tensor text_input is missing"),
    ({"inputs": [text("1+1="), text("[", "sampling_parameters")]}, "sampling_parameters is not JSON"),
    ({"inputs": [text('{"prompt": "\\ud800"}', "sampling_parameters")]}, "sampling_parameters is not JSON"),
    ({"inputs": [text(True, "text_input", "BOOL")]}, "tensor text_input is BYTES of shape [1], got 'BOOL'"),
    ({"inputs": [text("")]}, "the prompt is empty"),
    ({"outputs": [triton.InferRequestedOutput("label")]}, "there is no output 'label'"),
    ({"outputs": [triton.InferRequestedOutput("text_output", class_count=2)]}, "this output has no score for each"),
)


def test_what_is_wrong_is_one_sentence_and_the_stream_goes_on(world: World) -> None:
    right = {"inputs": [text("1+1=")], "parameters": NINE}

    def scene(client: Any) -> Any:
        replies = streamed(client, *({"inputs": [text("1+1=")]} | result for result, _ in WRONG), right)
        whole = []
        for result, _ in WRONG:
            with pytest.raises(triton.InferenceServerException) as error:
                client.infer(**({"model_name": "tiny", "inputs": [text("1+1=")]} | result))
            whole.append(error.value)
        return replies, whole

    replies, whole = play(world, scene)
    for result, one, (_, sentence) in zip(replies[""], whole, WRONG, strict=True):
        assert sentence in str(result)
        assert sentence in one.message()
        assert one.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")
    assert "".join(map(said, replies[str(len(WRONG))])) == world.plain("1+1=", 9)[0]
    assert world.front.meter.requests["refused"] == 2 * len(WRONG)


def test_metadata_count_as_headers_do(world: World) -> None:
    body, write = {"inputs": [text("47+85=")], "parameters": NINE}, world.front.write_tokens

    async def write_or_stall(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        if request.full:
            async for group in write(request):
                yield group
        yield NewTokens(1, (5,), (3,))
        await asyncio.Event().wait()

    def refusal(client: Any, name: str, value: str) -> Any:
        with pytest.raises(triton.InferenceServerException) as error:
            client.infer("tiny", **body, headers={name: value})
        return error.value

    def scene(client: Any) -> tuple[Any, list[Any], list[Any]]:
        full = client.infer("tiny", **body, headers={"x-full": "1", "x-deadline-ms": "60000"})
        late = streamed(client, body, body, headers={"x-deadline-ms": "60"})[""]
        wrong = {"x-deadline-ms": "soon", "x-full": "yes", "x-priority": "high"}
        refused = [refusal(client, *each) for each in (("x-deadline-ms", "60"), *wrong.items())]
        return full, late, refused

    world.front.write_tokens = write_or_stall
    full, late, (whole, *wrong) = play(world, scene)
    assert (said(full), full.as_numpy("exit_block").tolist()) == world.plain("47+85=", 9, full=True)[:2]
    sentence = "the deadline passed before the text was complete"
    assert [sentence in str(each) for each in late] == [True, True]
    assert (whole.status(), whole.message()) == ("StatusCode.DEADLINE_EXCEEDED", sentence)
    assert [each.status() for each in wrong] == 3 * ["StatusCode.INVALID_ARGUMENT"]
    assert world.front.meter.requests == {"answered": 1, "refused": 6, "cancelled": 0, "failed": 0}


def test_what_clients_ask_about_the_model(world: World) -> None:
    def scene(client: Any) -> None:
        assert client.is_model_ready("tiny")
        assert not client.is_model_ready("other")
        assert client.get_model_metadata("tiny").inputs[0].name == "text_input"
        assert client.get_model_config("tiny").config.model_transaction_policy.decoupled
        assert client.get_server_metadata().name == "isobatch"

    play(world, scene)


def test_without_a_replica_it_is_not_ready(world: World) -> None:
    world.replicas = 0
    assert play(world, lambda client: (client.is_server_live(), client.is_server_ready())) == (True, False)
    reply = world.client().get("/readyz")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["message"] == "no replica of decoder is running"


def test_a_client_that_goes_away_frees_its_pages(world: World) -> None:
    def scene(client: Any) -> None:
        news: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: news.put(error or result))
        client.async_stream_infer("tiny", [text("1+1=")], parameters={"max_tokens": 40})
        news.get(timeout=30)
        client.stop_stream(cancel_requests=True)

    async def freed() -> bool:
        for _ in range(200):
            if await world.loop.call(lambda engine: not engine.scheduler.residents):
                return True
            await asyncio.sleep(0.01)
        return False

    play(world, scene)
    assert asyncio.run(freed())


def test_a_stream_whose_client_does_not_read_is_read_no_further(world: World) -> None:
    world.grouped = 1  # a response for each token
    count, port = 1600, int(world.front.config.grpc_port or 0)  # some hundreds fit into the buffers on the way
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"1+1="]}}
    most = {"key": "max_tokens", "value": {"int64_param": 40}}
    body = message("ModelInferRequest")(model_name="tiny", inputs=[tensor], parameters=[most]).SerializeToString()
    sent = b"\0" + len(body).to_bytes(4, "big") + body  # as gRPC frames a message
    no_room = frame(4, 0, (4).to_bytes(2, "big") + bytes(4), stream=0)  # its client takes no bytes of an answer

    def scene(_: Any) -> list[int]:
        answered = [0]
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + no_room + frame(1, 4, headers(STREAM)))
            for _ in range(count):
                client.sendall(frame(0, 0, sent))
            while len(answered) < 6 or not 0 < answered[-1] == answered[-6]:
                assert len(answered) < 250, answered
                time.sleep(0.2)
                answered.append(world.front.meter.requests["answered"])
        return answered

    answered = play(world, scene)
    assert 0 < answered[-1] < count / 2, answered


def test_a_stream_that_cannot_be_read_on_is_counted(world: World) -> None:
    def scene(client: Any) -> None:
        with pytest.raises(triton.InferenceServerException, match="the message has"):
            raise streamed(client, {"inputs": [text("1" * CONFIG.max_body_bytes)]})[""][0]

    play(world, scene)
    assert world.front.meter.requests["refused"] == 1
