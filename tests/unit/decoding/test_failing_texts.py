"""A text that the network fails on ends alone, by one sentence; others write what they write without it."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from experiments.demos.sums import tokenizer
from isobatch.deployments.decoding import front
from isobatch.deployments.decoding.anatomy import anatomy_of
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.loop import DecodingError
from isobatch.deployments.decoding.network import Draw, choose
from isobatch.deployments.decoding.scheduler import DecodingLimits, NewTokens
from isobatch.deployments.decoding.sequences import UNDEFINED, Finish, LaunchFailedError, Sampling, TextRequest
from isobatch.profiles.errors import UserError
from tests.helpers.decoder_world import RAMPS, World
from tests.helpers.tiny_decoders import decoder, engine, plainly, t5

BAD = 22  # a token
PROMPTS = ((3, BAD, 5), (4,), tuple(range(1, 10)), (7, 8))
GOOD = Sampling(bias=((BAD, -100.0),))  # no text writes it
WAYS = ("recompute", "verified", "project")


def poisoned(kind: Callable[..., Any] = decoder, value: float = math.nan) -> Any:
    """A network in which a token's embedding is no number."""
    model = deepcopy(kind(seed=6))
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = value
    return model


def raising() -> Any:
    """A network that raises an error where a token is in a launch."""
    model = deepcopy(decoder(seed=7))
    anatomy = anatomy_of(model)
    embed = anatomy.embed

    def fail(tokens: torch.Tensor) -> torch.Tensor:
        if BAD in tokens.tolist():
            raise ValueError("this token is not known")
        return embed(tokens)

    anatomy.embed = fail
    return model


def written(running: Engine, asked: list[TextRequest]) -> list[tuple[list[int], Finish | None]]:
    """The tokens of texts that come together, and why each has ended."""
    result: dict[Any, tuple[list[int], Finish | None]] = {running.open(each): ([], None) for each in asked}
    while (news := running.step()) is not None:
        for each in news:
            result[each.name] = result[each.name][0] + list(each.tokens), each.finish
    return list(result.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row", [[math.nan] * 3, [-math.inf] * 3, [1.0, math.nan, 0.0], [1.0, math.inf, 0.0], [-math.inf, math.nan, 1.0]]
)
def test_no_token_is_chosen_of_logits_that_are_no_numbers(row: list[float], temperature: float) -> None:
    logits = torch.tensor([row, [0.0, -math.inf, -math.inf]])
    assert choose(logits, [Draw(Sampling(temperature), 1)] * 2).tolist() == [UNDEFINED, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [decoder, t5])
def test_a_text_whose_numbers_overflow_ends_alone(kind: Callable[..., Any], way: str) -> None:
    """Whoever runs with it, and whoever has its pages after it."""
    model = poisoned(kind)
    shape, verified, project = anatomy_of(model).shape, way == "verified", way == "project"
    requests = [shape.request(prompt, 4, sampling=GOOD) for prompt in PROMPTS]
    plain = [plainly(model, one, {} if verified else RAMPS, project)[0] for one in requests[1:]]
    for pages in (9, 40):
        running = engine(model, RAMPS, verified, pages, project=project)
        for order in (requests, requests[::-1], requests):
            result = written(running, order)[:: 1 if order is requests else -1]
            assert result[0] == ([], Finish.UNDEFINED)
            assert result[1:] == [(tokens, Finish.LENGTH) for tokens in plain]
        assert running.scheduler.pool.free == pages


def test_a_shorter_text_reads_no_page_of_it_as_padding() -> None:
    model = poisoned()
    running = engine(model, {}, pages=8)
    running.write_all([TextRequest(tuple(range(1, 21)), 12, sampling=GOOD)])  # fills all pages: they are used in turn
    requests = [TextRequest((BAD,) * 9, 6), TextRequest((4, 5, 6, 7, 8), 6, sampling=GOOD)]
    assert written(running, requests)[1] == (plainly(model, requests[1], {})[0], Finish.LENGTH)


def test_nobody_shares_pages_of_a_text_that_has_overflowed() -> None:
    running = engine(poisoned(), RAMPS)
    for _ in range(2):
        assert written(running, [TextRequest((BAD,) * 9, 6)]) == [([], Finish.UNDEFINED)]
    assert running.scheduler.pool.shared == 0


def test_texts_that_begin_alike_share_their_beginning_whoever_overflows_behind_it() -> None:
    running, beginning = engine(poisoned(), RAMPS), tuple(range(1, 9))
    for end, shared in (((1,), 0), ((BAD,) * 9, 8), ((BAD,) * 9, 16), ((2,), 24)):
        written(running, [TextRequest(beginning + end, 2, sampling=GOOD)])
        assert running.scheduler.pool.shared == shared


def test_pages_that_a_cancelled_text_has_spoilt_are_shared_once() -> None:
    model = poisoned()
    running = engine(model, {}, limits=DecodingLimits(page_tokens=4, prompt_rows=8, ttft_s=1e9, tpot_s=1e9))
    cancelled = running.open(TextRequest((*range(1, 8), BAD) * 3, 6))
    running.step()  # its first eight positions
    assert isinstance(cancelled, int)
    running.cancel(cancelled)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = 0.5
    for end, expected in ((1, Finish.UNDEFINED), (2, Finish.LENGTH), (3, Finish.LENGTH)):
        request = TextRequest((*range(1, 8), BAD, end), 6)
        tokens = plainly(model, request, {})[0] if expected is Finish.LENGTH else []
        assert written(running, [request]) == [(tokens, expected)]
    assert running.scheduler.pool.shared == 8 + 0 + 8


@pytest.mark.parametrize(("make", "sentence"), [(poisoned, "numbers are too large"), (raising, "failed on this text")])
def test_a_command_that_has_texts_written_ends_with_the_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        engine(make(), RAMPS).write_all([TextRequest((1, 2), 4, sampling=GOOD), TextRequest((BAD,), 4)])


@pytest.mark.parametrize("way", WAYS)
def test_the_text_at_which_a_launch_fails_is_found_and_ends_alone(way: str) -> None:
    model, verified, project = raising(), way == "verified", way == "project"
    requests = [TextRequest(prompt, 6, sampling=GOOD) for prompt in PROMPTS]
    plain = [plainly(decoder(seed=7), one, {} if verified else RAMPS, project)[0] for one in requests[1:]]
    running = engine(model, RAMPS, verified, 40, project=project)
    for order in (requests, requests[::-1]):
        result = written(running, order)[:: 1 if order is requests else -1]
        assert result == [([], Finish.FAILED), *((tokens, Finish.LENGTH) for tokens in plain)]
    assert running.scheduler.pool.free == 40


def test_three_texts_that_fail_before_any_gets_a_token_end_the_replica_but_one_that_is_tried_again_does_not() -> None:
    bad, good = [TextRequest((BAD, each), 4) for each in range(3)], TextRequest((1, 2), 4, sampling=GOOD)
    running = engine(raising(), RAMPS)
    requests = [bad[0], bad[0], bad[1], good, bad[2], bad[0]]
    finishes = [finish for each in requests for _, finish in written(running, [each])]
    assert finishes == [Finish.FAILED] * 3 + [Finish.LENGTH] + [Finish.FAILED] * 2
    with pytest.raises(LaunchFailedError, match="this token is not known"):
        written(running, [bad[1]])


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "RETRY_AFTER_S", 0.01)


@pytest.fixture(
    params=[(poisoned, 422, "refused", "numbers are too large", 1), (raising, 500, "failed", "failed 2 times", 2)]
)
def failing(request: pytest.FixtureRequest) -> Iterator[tuple[World, int, str, str, int]]:
    make, *expected = request.param
    world = World(make(), tokenizer())
    yield world, *expected
    world.loop.end()


@pytest.mark.parametrize("others", [{}, {"logprobs": 2}, {"stream": True}])
def test_its_request_has_one_answer_and_is_counted_once(failing: Any, others: dict[str, Any]) -> None:
    world, status, outcome, sentence, tries = failing
    body = {"prompt": [1, BAD, 2], "max_tokens": 4, "logit_bias": {str(BAD): -100}} | others
    reply = world.client().post("/v1/completions", json=body)
    assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (status, True), reply.text
    counts = {name: count for name, count in world.front.meter.requests.items() if count}
    assert (counts, world.asked) == ({outcome: 1}, tries)
    assert world.front.meter.burden() == (0, 0, 0), "it says nothing about the load"
    assert world.client().post("/v1/completions", json={**body, "prompt": [1, 2]}).status_code == 200
    assert world.loop.alive


def test_a_stream_that_has_begun_ends_with_the_sentence(world: World) -> None:
    async def ask(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        yield NewTokens(1, (5,), (3,))
        yield NewTokens(1, (), (), Finish.FAILED)

    world.front.write_tokens = ask
    reply = world.client().post("/v1/completions", json={"prompt": "1+1=", "stream": True})
    *_, last = (line for line in reply.text.split("\n\n") if line)
    assert "the network failed 2 times while it wrote this text" in last
    assert world.front.meter.requests["failed"] == 1


def test_a_text_that_one_replica_fails_on_is_written_by_another(world: World) -> None:
    async def ask(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        if not world.asked:
            world.asked += 1
            yield NewTokens(1, (), (), Finish.FAILED)
            return
        async for group in world.ask(request):
            yield group

    world.front.write_tokens = ask
    reply = world.client().post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 9})
    assert (reply.status_code, world.asked) == (200, 2)
    assert reply.json()["choices"][0]["text"] == world.plain("1+1=", 9)[0]


def test_a_device_that_is_lost_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(raising(), tokenizer())
    monkeypatch.setattr(anatomy_of(world.model), "weights", None)  # that cannot be read

    async def ask() -> None:
        async for _ in world.loop.write(TextRequest((BAD,), 1)):
            pass

    with pytest.raises(DecodingError, match="decoding failed"):
        asyncio.run(ask())
    world.loop.end()


def test_a_text_that_ends_replicas_ends_two_of_them(world: World) -> None:
    async def ask(request: TextRequest) -> AsyncGenerator[NewTokens, None]:
        world.asked += 1
        raise DecodingError("decoding failed: the device is lost")
        yield

    world.front.write_tokens = ask
    reply = world.client().post("/v1/completions", json={"prompt": "1+1="})
    assert (reply.status_code, world.asked) == (500, front.MOST_FAILED)
    assert "the network failed 2 times while it wrote this text" in reply.json()["error"]["message"]
