"""What is wrong at a decoder, over OpenAI's interface and over gRPC, as in tests/fuzz/test_http.py."""

import asyncio
from collections.abc import Iterator
from random import Random

import grpc
import pytest

from experiments.demos.sums import tokenizer
from experiments.shared.machine import free_port
from isobatch.deployments.decoding.grpc_texts import serving
from isobatch.deployments.decoding.openai_api import create_decoder_api
from tests.fuzz import cases
from tests.fuzz.attack import AT_ONCE, attack, within_memory
from tests.fuzz.clients import HOST, Grpc, judged, without_socket
from tests.helpers.decoder_world import CONFIG, World
from tests.helpers.tiny_decoders import decoder

CHAT = {"messages": [{"role": "user", "content": "1+1"}], "max_completion_tokens": 3, "temperature": 0.5}
PATHS = {"/v1/completions": cases.COMPLETION, "/v1/chat/completions": CHAT}


@pytest.fixture
def world() -> Iterator[World]:
    made = World(decoder(), tokenizer())
    made.front.config = CONFIG.model_copy(
        update={"grpc_port": free_port(), "max_body_bytes": 2**16, "max_tokens": 8, "max_prompts": 4}
    )
    yield made
    made.loop.end()


def request(random: Random) -> tuple[str, bytes, cases.Headers]:
    path = random.choice(list(PATHS))
    whole = PATHS[path]
    body = cases.as_json(cases.changed(whole, random)) if random.randrange(2) else None
    return path, body or cases.damaged(cases.as_json(whole), random), cases.headers(random)


def call(random: Random) -> tuple[str, bytes]:
    method = random.choice(["ModelInfer"] * 6 + ["ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig"])
    return method, cases.damaged(cases.TEXT_INFER, random) if random.randrange(4) else cases.noise(random)


def stream(random: Random) -> list[bytes]:
    """The last one is right."""
    return [*(cases.damaged(cases.TEXT_INFER, random) for _ in range(random.randint(1, 4))), cases.TEXT_INFER]


def test_openai(world: World) -> None:
    api = create_decoder_api(world.front)

    async def act(sent: tuple[str, bytes, cases.Headers]) -> str:
        path, body, headers = sent
        status, result, content = await without_socket(api, path, headers, body)
        if result[b"content-type"].startswith(b"text/event-stream"):
            assert content.endswith(b"data: [DONE]\n\n")
            return "streamed"
        return judged((status, result, content))

    async def all_cases() -> None:
        await attack("openai", 0.02, request, act, AT_ONCE)

    within_memory("openai", lambda: asyncio.run(all_cases()))


def test_grpc_texts(world: World) -> None:
    async def all_cases() -> None:
        target = f"{HOST}:{world.front.config.grpc_port}"
        async with serving(world.front), grpc.aio.insecure_channel(target) as channel:
            client = Grpc(channel)
            await attack("grpc_texts", 0.02, call, lambda sent: client.unary(*sent), AT_ONCE)
            await attack("grpc_text_streams", 0.01, stream, client.text_stream, AT_ONCE)

    within_memory("grpc_texts", lambda: asyncio.run(all_cases()))
