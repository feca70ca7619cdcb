"""OpenAI's interface without Ray: the shape of answers and streams, what is refused, and who goes away."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from experiments.demos.sums import characters, tokenizer
from isobatch.deployments.decoding import front
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.openai_api import COMPLETION_SHAPE, TextReply, whole_texts
from isobatch.deployments.decoding.ramp_rules import GenerationDefaults, check_decoder, generation_defaults
from isobatch.deployments.decoding.scheduler import NewTokens, ReplicaFull
from isobatch.deployments.decoding.sequences import Finish, TextRequest, TextTerms
from isobatch.deployments.front.answers import RefusedError
from isobatch.profiles.errors import UserError
from tests.helpers.decoder_world import CONFIG, RAMPS, STOP, World
from tests.helpers.documented import ask_examples, check_document
from tests.helpers.tiny_decoders import decoder, plain_logprobs, plainly, t5


@pytest.fixture
def world() -> Iterator[World]:
    made = World(decoder(), tokenizer())
    yield made
    made.loop.end()


@pytest.fixture
def world_of_t5() -> Iterator[World]:
    made = World(t5(), characters())
    yield made
    made.loop.end()


def events(told: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in told.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion(world: World) -> None:
    reply = world.client().post("/v1/completions", json={"model": "tiny", "prompt": "47+85=", "max_tokens": 9})
    text, depths, count = world.plain("47+85=", 9)
    assert reply.status_code == 200
    said = reply.json()
    assert said["object"] == "text_completion"
    (choice,) = said["choices"]
    assert (choice["text"], choice["exit_blocks"]) == (text, depths)
    assert choice["finish_reason"] in ("stop", "length")
    assert said["usage"] == {"prompt_tokens": 6, "completion_tokens": count, "total_tokens": 6 + count}


def test_several_prompts_are_several_choices_whole_and_streamed(world: World) -> None:
    asked = {"prompt": ["1+1=", "2+2=", "3+9="], "max_tokens": 7}
    plain = [world.plain(prompt, 7)[:2] for prompt in asked["prompt"]]  # type: ignore[attr-defined]
    whole = world.client().post("/v1/completions", json=asked).json()["choices"]
    assert [(each["text"], each["exit_blocks"]) for each in whole] == plain
    streamed = {index: ("", []) for index in range(3)}
    for event in events(world.client().post("/v1/completions", json=asked | {"stream": True}).text):
        for each in event["choices"]:
            text, depths = streamed[each["index"]]
            streamed[each["index"]] = text + each["text"], depths + each["exit_blocks"]
    assert list(streamed.values()) == plain


def test_a_chat_streams_its_role_its_text_and_if_asked_its_usage(world: World) -> None:
    asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": "4 + 5"}]}], "stream": True}
    asked |= {"max_completion_tokens": 6, "stream_options": {"include_usage": True}}
    told = events(world.client().post("/v1/chat/completions", json=asked).text)
    text, _, count = world.plain("4+5=", 6)
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in told[:-1]) == text
    assert told[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == count
    whole = world.client().post("/v1/chat/completions", json={**asked, "stream": False, "stream_options": None}).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 400, "not JSON"),
        ([], 400, "must be a JSON object"),
        ({}, 400, "prompt is missing"),
        ({"prompt": "1+1=", "max_token": 4}, 400, "max_token is not served; there are: model,"),
        ({"prompt": ["1+1=", "2+2="], "n": 2}, 400, "n = 2: 4 texts in all: 3 are allowed"),
        ({"prompt": "1+1=", "n": 0}, 400, "n = 0: Input should be greater than or equal to 1"),
        ({"prompt": "1+1=", "min_p": 1.5}, 400, "min_p = 1.5: Input should be less than or equal to 1"),
        ({"prompt": "1+1=", "presence_penalty": 3}, 400, "presence_penalty = 3: Input should be less than or equal to"),
        ({"prompt": "1+1=", "logit_bias": {"23": 1}}, 400, "logit_bias has token 23: the model knows 23 tokens"),
        ({"prompt": "1+1=", "logit_bias": {"x": 1}}, 400, "logit_bias = an object: Input should be a valid integer"),
        ({"prompt": "1+1=", "logit_bias": {"1": 101}}, 400, "Input should be less than or equal to 100"),
        ({"prompt": "1+1=", "logprobs": 21}, 400, "logprobs = 21: Input should be less than or equal to 20"),
        ({"prompt": "1+1=", "logprobs": True}, 400, "logprobs = True: must be a number, not true or false"),
        ({"prompt": "1+1=", "logprobs": 1, "echo": True}, 400, "logprobs = 1: with echo, they would be missing for"),
        ({"prompt": "1+1=", "temperature": -1}, 400, "temperature = -1: "),
        ({"prompt": "1+1=", "top_p": 0}, 400, "top_p = 0: "),
        ({"prompt": "1+1=", "max_tokens": 0}, 400, "max_tokens = 0: "),
        ({"prompt": "1+1=", "max_tokens": 41}, 400, "max_tokens = 41: 40 are allowed"),
        ({"prompt": "1" * 30, "max_tokens": 35}, 400, "30 tokens and max_tokens is 35: the model reads 64"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "prompt has 0 texts"),
        ({"prompt": ["1"] * 4}, 400, "prompt has 4 texts: 1 to 3 are allowed"),
        ({"prompt": [1, 99]}, 400, "prompt has token 99: the model knows 23 tokens"),
        ({"prompt": [True, False]}, 400, "prompt = [True, False]: a prompt is a text, a list of texts, a list of tok"),
        ({"prompt": [1, "1"]}, 400, "prompt = [1, '1']: a prompt is"),
        ({"prompt": [-1]}, 400, "prompt = [-1]: a prompt is"),
        ({"prompt": [[]]}, 400, "the prompt is empty"),
        ({"prompt": 5}, 400, "prompt = 5: a prompt is"),
        ({"prompt": "1+1=", "max_tokens": True}, 400, "max_tokens = True: must be a number, not true or false"),
        ({"prompt": "1+1=", "temperature": True}, 400, "temperature = True: must be a number"),
        ({"prompt": "1+1=", "seed": False}, 400, "seed = False: must be a number"),
        ({"prompt": "1+1=", "n": True}, 400, "n = True: must be a number"),
        ({"prompt": "1+1=", "repetition_penalty": 0}, 400, "repetition_penalty = 0: Input should be greater than 0"),
        ({"prompt": "1+1=", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens = 5: max_tokens is only 4"),
        ({"prompt": "1", "stop": ["a"] * 5}, 400, "stop = ['a', 'a', 'a', 'a', 'a']: List should have at most 4 items"),
        ({"prompt": "1", "stop": ["a" * 257]}, 400, "at most 256 characters"),
        ({"prompt": "1", "stop": ""}, 400, "stop = "),
        ({"prompt": "1", "model": "other"}, 404, "model = 'other': this server has tiny"),
        (b" " * 501, 413, "501 bytes: 500 are allowed"),
    ],
)
def test_what_is_wrong_is_named_in_one_sentence(world: World, body: Any, status: int, sentence: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = world.client().post("/v1/completions", content=content)
    assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (status, True), reply.text
    assert world.asked == 0


def test_null_is_what_nobody_has_set(world: World) -> None:
    nulls: list[dict[str, Any]] = [{name: None} for name in ("temperature", "top_p", "stream")]
    for unset in (*nulls, {"stream": True, "stream_options": {"include_usage": None}}):
        reply = world.client().post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 2} | unset)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "neutral",
    [
        {"response_format": {"type": "text"}},
        {"store": False},
        {"repetition_penalty": 1.0},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "n": 1, "logit_bias": {}},
        {"tools": []},
        {"tool_choice": "none"},
        {"top_logprobs": 0},
    ],
)
def test_a_field_that_changes_nothing_is_accepted(world: World, neutral: dict[str, Any]) -> None:
    client, said = world.client(), {"role": "user", "content": "1+1"}
    told = [said, {"role": "assistant", "content": "2", "refusal": None, "tool_calls": None, "audio": None}, said]
    reply = client.post("/v1/chat/completions", json={"messages": told, "max_tokens": 2} | neutral)
    assert reply.status_code == 200, reply.text
    if not neutral.keys() & {"tools", "tool_choice", "top_logprobs"}:
        reply = client.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 2} | neutral)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"store": True},
        {"top_logprobs": 3},
    ],
)
def test_a_field_that_would_change_something_is_refused_by_its_name(world: World, field: dict[str, Any]) -> None:
    reply = world.client().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "1"}]} | field)
    assert (reply.status_code, reply.json()["error"]["message"].split(" = ")[0]) == (400, *field), reply.text


def test_each_text_for_a_prompt_is_drawn_with_the_next_seed(world: World) -> None:
    fields = {"prompt": "47+85=", "max_tokens": 12, "temperature": 2.0, "ignore_eos": True, "seed": 5}
    reply = world.client().post("/v1/completions", json=fields | {"n": 3}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in reply["choices"]] == [drawn(world, seed=5 + number) for number in range(3)]
    assert reply["usage"] == {"prompt_tokens": 6, "completion_tokens": 36, "total_tokens": 42}
    del fields["seed"]
    several = world.client().post("/v1/completions", json=fields | {"n": 3}).json()["choices"]
    assert len({choice["text"] for choice in several}) > 1


def test_texts_may_begin_with_their_prompts(world: World) -> None:
    text = world.plain("47+85=", 9)[0]
    tokens = world.words("47+85=")["input_ids"]
    for prompt in ("47+85=", tokens):
        asked = {"prompt": prompt, "max_tokens": 9, "echo": True, "n": 2}
        whole = world.client().post("/v1/completions", json=asked).json()
        assert [choice["text"] for choice in whole["choices"]] == ["47+85=" + text] * 2
        streamed = ["", ""]
        for event in events(world.client().post("/v1/completions", json=asked | {"stream": True}).text):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["text"]
        assert streamed == ["47+85=" + text] * 2


def expected_logprobs(world: World, count: int) -> tuple[list[int], list[int], list[list[float]]]:
    """The tokens after a prompt, their depths, and the log probabilities of all tokens at the place of each."""
    asked = TextRequest(tuple(world.words("47+85=")["input_ids"]), count, STOP)
    tokens, depths = plainly(world.model, asked, RAMPS)
    return tokens, depths, plain_logprobs(world.model, asked, tokens, depths)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion_are_those_where_its_tokens_were_known(world: World, stream: bool) -> None:
    tokens, depths, known = expected_logprobs(world, 9)
    assert len(set(depths)) > 1
    asked = {"prompt": "47+85=", "max_tokens": 9, "logprobs": 2, "stream": stream, "logit_bias": {}}
    reply = world.client().post("/v1/completions", json=asked)
    choices = [event["choices"][0] for event in (events(reply.text) if stream else [reply.json()])]
    told = {name: [each for choice in choices for each in choice["logprobs"][name]] for name in choices[0]["logprobs"]}
    texts = [world.texts.token_text(token) for token in tokens]
    assert told["tokens"] == texts
    assert told["blocks"] == depths
    assert told["text_offset"] == [len("".join(texts[:place])) for place in range(len(texts))]
    assert told["token_logprobs"] == pytest.approx([row[token] for row, token in zip(known, tokens, strict=True)])
    for top, row, token in zip(told["top_logprobs"], known, tokens, strict=True):
        best = {*sorted(range(len(row)), key=lambda each: -row[each])[:2], token}
        assert top == pytest.approx({world.texts.token_text(each): row[each] for each in best})


def test_log_probabilities_of_a_chat(world: World) -> None:
    tokens, depths, known = expected_logprobs(world, 6)
    asked = {"messages": [{"role": "user", "content": "47 + 85"}], "max_tokens": 6, "logprobs": True}
    for count in (0, 3):
        said = world.client().post("/v1/chat/completions", json=asked | {"top_logprobs": count}).json()
        content = said["choices"][0]["logprobs"]["content"]
        assert [each["block"] for each in content] == depths
        for each, row, token in zip(content, known, tokens, strict=True):
            text = world.texts.token_text(token)
            assert (each["token"], each["bytes"]) == (text, list(text.encode()))
            assert each["logprob"] == pytest.approx(row[token])
            assert [other["logprob"] for other in each["top_logprobs"]] == pytest.approx(sorted(row)[::-1][:count])


def test_openais_client_reads_log_probabilities_and_several_texts(world: World) -> None:
    with OpenAI(base_url="http://testserver/v1", api_key="none", http_client=world.client()) as client:
        told = client.completions.create(model="tiny", prompt="47+85=", max_tokens=5, logprobs=2, n=2)
        said = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "47+85"}], max_tokens=5, logprobs=True, top_logprobs=2
        )
    tokens, _, known = expected_logprobs(world, 5)
    wanted = pytest.approx([row[token] for row, token in zip(known, tokens, strict=True)])
    assert [choice.logprobs and choice.logprobs.token_logprobs for choice in told.choices] == [wanted] * 2
    logprobs = said.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert [each.logprob for each in logprobs.content] == wanted
    assert [len(each.top_logprobs) for each in logprobs.content] == [2] * len(tokens)


def test_what_changes_logits_changes_the_text(world: World) -> None:
    text, _, _ = world.plain("47+85=", 12)
    (first,) = world.words(text[0])["input_ids"]

    def written(**fields: Any) -> str:
        asked = {"prompt": "47+85=", "max_tokens": 12, "ignore_eos": True} | fields
        return str(world.client().post("/v1/completions", json=asked).json()["choices"][0]["text"])

    assert text[0] not in written(logit_bias={str(first): -100})
    assert set(written(logit_bias={str(first): 100})) == {text[0]}
    assert len(set(written(presence_penalty=2, frequency_penalty=2))) > len(set(written()))
    assert written(repetition_penalty=1.0) == written() != written(repetition_penalty=2.0)
    world.front.defaults = GenerationDefaults(repetition_penalty=2.0)
    assert written() == written(repetition_penalty=2.0)


def drawn(world: World, **fields: Any) -> str:
    asked = {"prompt": "47+85=", "max_tokens": 12, "ignore_eos": True, "temperature": 2.0} | fields
    reply = world.client().post("/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_without_a_seed_each_request_draws_anew_and_with_one_the_same_again(world: World) -> None:
    assert len({drawn(world) for _ in range(8)}) > 1
    assert len({drawn(world, seed=3) for _ in range(4)}) == 1
    three = {"prompt": ["1+1="] * 3, "max_tokens": 12, "temperature": 2.0, "ignore_eos": True}
    texts = world.client().post("/v1/completions", json=three)
    assert len({choice["text"] for choice in texts.json()["choices"]}) > 1


def test_defaults_come_from_the_checkpoints_generation_config(world: World, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 2.0, "top_k": 0, "max_new_tokens": 5, "eos_token_id": 0, "pad_token_id": 0}'
    )
    greedy = drawn(world, temperature=0)
    assert drawn(world, temperature=None) == greedy
    world.front.defaults = generation_defaults(tmp_path)
    assert len({drawn(world, temperature=None) for _ in range(8)}) > 1
    assert {drawn(world, temperature=None, top_k=1) for _ in range(4)} == {greedy}
    asked = {"prompt": "47+85=", "max_tokens": None, "ignore_eos": True}
    assert world.client().post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 5


def test_a_generation_config_that_is_wrong_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(UserError, match=r"generation_config.json: temperature: Input should be a valid number"):
        check_decoder(tmp_path)


def test_a_text_ends_neither_before_its_least_tokens_nor_where_its_end_is_ignored(world: World) -> None:
    _, _, count = world.plain("3+4=", 40)
    assert count < 40, "this prompt shows nothing: its text does not end by itself"

    def usage(**fields: Any) -> tuple[int, str]:
        said = world.client().post("/v1/completions", json={"prompt": "3+4=", "max_tokens": 40} | fields).json()
        return said["usage"]["completion_tokens"], said["choices"][0]["finish_reason"]

    assert usage() == (count, "stop")
    assert usage(min_tokens=count)[0] > count
    assert usage(ignore_eos=True) == (40, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_text_usage_and_pages_however_tokens_are_grouped(world: World, stream: bool) -> None:
    text, depths, _ = world.plain("47+85=", 20)
    stop = text[3:5]
    end = next(count for count in range(1, 21) if stop in world.plain("47+85=", count)[0])
    asked = {"prompt": "47+85=", "max_tokens": 20, "stop": [stop, "nothing"], "stream": stream}
    for group in (1, 3, 20):
        world.grouped = group
        reply = world.client().post(
            "/v1/completions", json=asked | ({"stream_options": {"include_usage": True}} if stream else {})
        )
        told = events(reply.text) if stream else [reply.json()]
        choices = [event["choices"][0] for event in told if event["choices"]]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert [depth for choice in choices for depth in choice["exit_blocks"]] == depths[:end]
        assert choices[-1]["finish_reason"] == "stop"
        assert told[-1]["usage"]["completion_tokens"] == end
    assert world.front.meter.workload()["outputs"] == [end] * 3
    until(lambda: world.engine.scheduler.pool.free == world.engine.scheduler.pool.count)


def test_a_t5_answers_a_completion_over_the_loss_of_replicas(world_of_t5: World) -> None:
    text, depths, count = world_of_t5.plain("47+85=", 12)
    world_of_t5.failing = 2
    said = world_of_t5.client().post("/v1/completions", json={"prompt": "47+85=", "max_tokens": 12}).json()
    assert (said["choices"][0]["text"], said["choices"][0]["exit_blocks"]) == (text, depths)
    assert said["usage"] == {"prompt_tokens": 6, "completion_tokens": count, "total_tokens": 6 + count}


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
        world.front._write_tokens = self.ask

    async def ask(self, request: TextRequest) -> AsyncGenerator[NewTokens | ReplicaFull, None]:
        self.asked.append(request)
        if len(self.asked) == 1:
            yield NewTokens(1, (5,), (3,))
            raise ConnectionError
        if len(self.asked) < 2 + self._times:
            self._world.now_s += self._full_for_s
            yield ReplicaFull(0.01)
        else:
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


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_not_let_in_is_told_when_to_come_again(world: World, stream: bool) -> None:
    world.full = True
    reply = world.client().post("/v1/completions", json={"prompt": "1+1=", "stream": stream})
    assert reply.status_code == 429
    assert 3 <= int(reply.headers["retry-after"]) <= 8  # clients that are refused together come back one by one
    assert reply.json()["error"]["type"] == "rate_limit_error"


def test_nobody_goes_on_with_the_other_texts_of_a_request_where_one_is_refused(world: World) -> None:
    cancelled = []

    async def ask(request: TextRequest) -> AsyncGenerator[NewTokens | ReplicaFull, None]:
        if request.max_tokens == 1:
            yield ReplicaFull(1.0)
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request.max_tokens)
            raise

    async def answer() -> None:
        requests = [world.front.request((1, 2), TextTerms(most)) for most in (3, 1, 2)]
        with pytest.raises(RefusedError, match="too many"):
            await whole_texts(world.front, TextReply(COMPLETION_SHAPE, "tiny", world.texts, requests, (), 0.0))
        assert sorted(cancelled) == [2, 3]

    world.front._write_tokens = ask
    asyncio.run(answer())


def test_a_key_is_asked_for_everywhere_but_where_health_is_told(world: World) -> None:
    client = world.client(b"secret")
    assert client.get("/healthz").status_code == 200
    assert client.get("/").url.path == "/docs"
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()["data"][0]["id"] == "tiny"


def test_a_page_that_is_allowed_asks_and_reads_the_answer(world: World) -> None:
    world.front.config = CONFIG.model_copy(update={"allowed_origins": ("https://shop.example",)})
    told = {"json": {"prompt": "1+1=", "max_tokens": 1, "stream": True}, "headers": {"Origin": "https://shop.example"}}
    reply = world.client().post("/v1/completions", **told)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://shop.example")


def test_what_the_server_has_and_what_it_does_not(world: World) -> None:
    client = world.client()
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert client.get("/v1/models/other").status_code == 404
    assert "POST /v1/completions" in client.get("/v1/nothing").json()["error"]["message"]
    assert client.get("/stats").json()["requests"]["answered"] == 0
    assert client.get("/openapi.json").status_code == client.get("/docs").status_code == 200
    assert client.get("/").url.path == "/docs", "a browser at the address that was printed is shown something"


def test_the_interface_is_described_and_its_examples_are_answered(world: World) -> None:
    client = world.client()
    check_document(client.app.openapi())
    assert ask_examples(client, name="tiny") == 2 + 2 + 5


def test_what_cannot_be_done_fails_for_who_asked_and_decoding_goes_on(world: World) -> None:
    def follow_nothing(_: Engine) -> None:
        raise UserError("no ramp is known there")

    async def ask() -> None:
        with pytest.raises(UserError, match="no ramp"):
            await asyncio.wait_for(world.loop.call(follow_nothing), 60)
        with pytest.raises(AssertionError, match="never fits"):
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
    until(lambda: not world.loop.alive)
    with pytest.raises(RuntimeError, match="decoding failed: no room"):
        asyncio.run(ask())
    with pytest.raises(RuntimeError, match="decoding failed: no room"):
        asyncio.run(asyncio.wait_for(world.loop.call(lambda engine: engine), 60))


def until(true: Any, within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)
