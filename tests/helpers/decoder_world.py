"""A decoder's front beside one engine, without Ray."""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi.testclient import TestClient

from experiments.demos.sums import tokenizer
from isobatch.deployments.decoding.anatomy import shape_of
from isobatch.deployments.decoding.client_meter import ClientMeter
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.front import DecoderFront
from isobatch.deployments.decoding.grammars import Grammars
from isobatch.deployments.decoding.loop import EngineLoop
from isobatch.deployments.decoding.openai_api import create_decoder_api
from isobatch.deployments.decoding.replica import ReplicaState
from isobatch.deployments.decoding.replica_group import summed
from isobatch.deployments.decoding.scheduler import NewTokens, ReplicaFull
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.decoding.texts import TextTokens
from isobatch.deployments.metrics import TEXT_FRONT, MetricSeries
from tests.helpers.documented import DocumentedClient, with_document
from tests.helpers.scraping import NotedMetrics
from tests.helpers.tiny_decoders import engine, plainly

CONFIG = DecoderConfig(model="/models/tiny", max_tokens=40, max_prompts=3, max_body_bytes=500)
RAMPS = {0: 0.3, 2: 0.3}
STOP = frozenset([0])


def events(body: str) -> list[Any]:
    """The events of a stream before its end."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class World:
    """A front beside one engine; `failing` replicas write one group and end. `grouped`: tokens in each group; 0: as
    they come."""

    def __init__(self, model: Any, words: Any) -> None:
        self.model, self.words = model, words
        self.grammars = Grammars(words, model.config.vocab_size, STOP)
        self.engine = engine(model, RAMPS, pages=4 * 32, grammars=self.grammars)
        self.loop = EngineLoop(self.engine)
        self.failing, self.full, self.asked, self.grouped = 0, False, 0, 0
        self.texts = TextTokens(words, 64)
        self.metrics, self.now_s, self.replicas = NotedMetrics(), 0.0, 1
        meter = ClientMeter(MetricSeries(TEXT_FRONT, self.metrics), lambda: self.now_s, 1.0, 0.2)
        shape = shape_of(model.config)
        self.front = DecoderFront(CONFIG, "tiny", shape, self.texts, STOP, self.ask, meter, self.stats)
        self.front.no_grammars = self.grammars.obstacle
        self.clients: dict[bytes | None, DocumentedClient] = {}  # by their key

    async def ask(self, request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        self.asked += 1
        if self.full:
            raise ReplicaFull(2.5)
        held = NewTokens(0, (), ())
        async for group in self.loop.write(request):
            held = NewTokens(
                0, held.tokens + group.tokens, held.depths + group.depths, group.finish, held.logprobs + group.logprobs
            )
            size = self.grouped or len(held.tokens)
            while (held.finish is None and len(held.tokens) >= size) or (held.finish and len(held.tokens) > size):
                yield NewTokens(0, held.tokens[:size], held.depths[:size], logprobs=held.logprobs[:size])
                rest = {name: getattr(held, name)[size:] for name in ("tokens", "depths", "logprobs")}
                held = replace(held, **rest)
            if held.finish:
                yield held
            if self.failing:
                self.failing -= 1
                raise ConnectionError

    async def stats(self) -> dict[str, Any]:
        return summed([ReplicaState(0, 0, 8, 8, 0, 0.0, {}, {0: (2, 4, 16)})] * self.replicas, 4)

    def client(self, key: bytes | None = None) -> TestClient:
        self.front.key = key
        if key not in self.clients:  # an application takes longer to make than a text to be written
            api = with_document(create_decoder_api(self.front), f"decoder, key: {key is not None}")
            self.clients[key] = DocumentedClient(api, raise_server_exceptions=False)
        return self.clients[key]

    def plain(self, prompt: str, max_tokens: int, full: bool = False) -> tuple[str, list[int], int]:
        """Text, depths and tokens of the plain decoder; `full`: without exits."""
        request = shape_of(self.model.config).request(self.words(prompt)["input_ids"], max_tokens, STOP)
        tokens, depths = plainly(self.model, request, {} if full else RAMPS)
        return tokenizer().decode(tokens, skip_special_tokens=True), depths, len(tokens)
