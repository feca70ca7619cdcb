"""The fields of OpenAI's requests over HTTP, without Ray: what is refused, and what changes texts."""

import asyncio
import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import decoders

from experiments.demos.sums import END, tokenizer
from isobatch.deployments.decoding.engine_setup import stop_tokens
from isobatch.deployments.decoding.openai_api import TextReply
from isobatch.deployments.decoding.openai_requests import ChatRequest, request_of
from isobatch.deployments.decoding.ramp_rules import GenerationDefaults, check_decoder, generation_defaults
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.decoding.texts import TextTokens
from isobatch.deployments.front.answers import RefusedError
from isobatch.profiles.errors import UserError
from tests.helpers.decoder_world import RAMPS, STOP, World, events
from tests.helpers.tiny_decoders import VOCABULARY, decoder, plain_logprobs, plainly


@pytest.fixture(scope="module")
def refusing() -> Iterator[World]:
    """One for all requests that are refused before they come to its engine."""
    made = World(decoder(), tokenizer())
    yield made
    made.loop.end()


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 400, "not JSON"),
        ([], 400, "must be a JSON object"),
        ({}, 400, "prompt is missing"),
        ({"prompt": "1+1=", "max_token": 4}, 400, "max_token is not served; there are: model,"),
        ({"prompt": ["1+1=", "2+2="], "n": 2}, 400, "n = 2: 4 texts in all: 3 are allowed"),
        ({"prompt": "1+1=", "n": 2, "best_of": 3}, 400, "best_of = 3: must be as n, since all texts that are written"),
        ({"prompt": "1+1=", "best_of": True}, 400, "best_of = True: "),
        ({"prompt": "1+1=", "n": 0}, 400, "n = 0: Input should be greater than or equal to 1"),
        ({"prompt": "1+1=", "min_p": 1.5}, 400, "min_p = 1.5: Input should be less than or equal to 1"),
        ({"prompt": "1+1=", "presence_penalty": 3}, 400, "presence_penalty = 3: Input should be less than or equal to"),
        ({"prompt": "1+1=", "logit_bias": {"23": 1}}, 400, "logit_bias has token 23: the model knows 23 tokens"),
        ({"prompt": "1+1=", "logit_bias": {"x": 1}}, 400, "logit_bias.x = 'x': Input should be a valid integer"),
        (
            {"prompt": "1+1=", "logit_bias": {"9" * 400: 1}},
            400,
            f"logit_bias has token {'9' * 38}...{'9' * 37}: the model knows 23 tokens",
        ),
        ({"prompt": "1+1=", "logit_bias": {"1": 101}}, 400, "Input should be less than or equal to 100"),
        ({"prompt": "1+1=", "logprobs": 21}, 400, "logprobs = 21: Input should be less than or equal to 20"),
        ({"prompt": "1+1=", "logprobs": 1, "echo": True}, 400, "logprobs = 1: with echo, they would be missing for"),
        ({"prompt": "1+1=", "temperature": -1}, 400, "temperature = -1: "),
        ({"prompt": "1+1=", "seed": 2**63}, 400, f"seed = {2**63}: Input should be less than or equal to {2**63 - 1}"),
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
        ({"prompt": "1+1=", "repetition_penalty": 0}, 400, "repetition_penalty = 0: Input should be greater than or"),
        ({"prompt": "1+1=", "repetition_penalty": 1e-45}, 400, "repetition_penalty = 1e-45: Input should be greater"),
        ({"prompt": "1+1=", "response_format": {}}, 400, "response_format = an object: must be an object whose type"),
        ({"prompt": "1+1=", "response_format": "json"}, 400, "response_format = 'json': must be an object whose type"),
        ({"prompt": "1+1=", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens = 5: max_tokens is only 4"),
        ({"prompt": "1", "stop": ["a"] * 5}, 400, "stop = ['a', 'a', 'a', 'a', 'a']: List should have at most 4 items"),
        ({"prompt": "1", "stop": ["a" * 257]}, 400, "at most 256 characters"),
        ({"prompt": "1", "stop": ""}, 400, "stop = "),
        ({"prompt": "1", "stop": 3}, 400, "stop = 3: must be a text, or a list of texts"),
        ({"prompt": "1", "stream_options": {"x": 1}}, 400, "stream_options.x is not served"),
        ({"prompt": "1", "model": "other"}, 404, "model = 'other': this server has tiny"),
        (b" " * 501, 413, "501 bytes: 500 are allowed"),
    ],
)
def test_what_is_wrong_is_named_in_one_sentence(refusing: World, body: Any, status: int, sentence: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = refusing.client().post("/v1/completions", content=content)
    assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (status, True), reply.text
    assert refusing.asked == 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content = 5: must be a text, or a list of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "nothing else is read"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
        ({"messages": [{"role": "bard", "content": "1"}]}, "messages.0.role = 'bard': Input should be 'system'"),
        ({"tools": [{"type": "function"}]}, "must be empty or left out: it is not served"),
    ],
)
def test_what_is_wrong_in_a_chat_is_named_where_it_stands(
    refusing: World, fields: dict[str, Any], sentence: str
) -> None:
    body = {"messages": [{"role": "user", "content": "1+1="}]} | fields
    reply = refusing.client().post("/v1/chat/completions", json=body)
    assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (400, True), reply.text


MANY = 50_000


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({f"x{number}": 1 for number in range(MANY)}, "x0 is not served; there are: model,"),
        ({"logit_bias": dict.fromkeys(map(str, range(MANY)), "1+")}, "logit_bias = an object: has 50000 tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]},
            "messages.0.content.0.text is missing",
        ),
    ],
)
def test_many_wrong_values_have_one_error(fields: dict[str, Any], sentence: str) -> None:
    """One for each of millions would take gigabytes."""
    body = {"messages": [{"role": "user", "content": "1+1="}]} | fields
    tracemalloc.start()
    with pytest.raises(RefusedError, match=re.escape(sentence)):
        request_of(ChatRequest, body)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 200 * MANY


@pytest.mark.parametrize("fields", [{"temperature": 1, "top_k": 10**320}, {"stop": "<image>", "min_tokens": 2}])
def test_no_request_ends_a_replica(world: World, fields: dict[str, Any]) -> None:
    """With a number that no device holds, or with a token that the tokenizer has and the network has not."""
    words = tokenizer()
    words.add_tokens([str(number) * 9 for number in range(VOCABULARY)] + ["<image>"], special_tokens=True)
    world.front.texts = TextTokens(words, 64)
    reply = world.client().post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4} | fields)
    assert reply.status_code == 200, reply.text
    assert world.loop.alive


def test_null_is_what_nobody_has_set(world: World) -> None:
    nulls: list[dict[str, Any]] = [{name: None} for name in ("temperature", "top_p", "stream")]
    for unset in (*nulls, {"stream": True, "stream_options": {"include_usage": None}}):
        reply = world.client().post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 2} | unset)
        assert reply.status_code == 200, reply.text


def test_null_is_also_what_nobody_has_set_in_fields_that_are_not_served(world: World) -> None:
    """Some clients write all of OpenAI's fields."""
    message = {"role": "user", "content": "1+1", "tool_call_id": None}
    unset = dict.fromkeys(("metadata", "functions", "parallel_tool_calls", "service_tier"))
    reply = world.client().post("/v1/chat/completions", json={"messages": [message], "max_tokens": 2} | unset)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "neutral",
    [
        {"response_format": {"type": "text"}},
        {"store": False},
        {"repetition_penalty": 1.0},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "n": 1, "logit_bias": {}},
        {"metadata": {"run": "7"}, "service_tier": "auto"},
        {"tools": [], "parallel_tool_calls": False},
        {"tool_choice": "none"},
        {"top_logprobs": 0},
    ],
)
def test_a_field_that_changes_nothing_is_accepted(world: World, neutral: dict[str, Any]) -> None:
    client, message = world.client(), {"role": "user", "content": "1+1"}
    messages = [
        message,
        {"role": "assistant", "content": "2", "refusal": None, "tool_calls": None, "audio": None},
        message,
    ]
    reply = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2} | neutral)
    assert reply.status_code == 200, reply.text
    if not neutral.keys() & {"tools", "tool_choice", "top_logprobs"}:
        reply = client.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 2} | neutral)
        assert reply.status_code == 200, reply.text


def test_a_chat_template_reads_the_name_of_a_message(world: World) -> None:
    world.words.chat_template = "{% for each in messages %}{{ each.name or '0' }}{{ each.content }}{% endfor %}="
    messages = [{"role": "user", "content": "7+", "name": "4"}, {"role": "user", "content": "5", "name": None}]
    reply = world.client().post("/v1/chat/completions", json={"messages": messages, "max_tokens": 9}).json()
    text, depths, _ = world.plain("47+05=", 9)
    assert reply["usage"]["prompt_tokens"] == len("47+05=")
    assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["exit_blocks"]) == (text, depths)


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "grammar"}},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"store": True},
        {"service_tier": "priority"},
        {"top_logprobs": 3},
    ],
)
def test_a_field_that_would_change_something_is_refused_by_its_name(refusing: World, field: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "1"}]} | field
    reply = refusing.client().post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["message"].split(" = ")[0]) == (400, *field), reply.text


def test_each_text_for_a_prompt_is_drawn_with_the_next_seed(world: World) -> None:
    fields = {"prompt": "47+85=", "max_tokens": 12, "temperature": 2.0, "ignore_eos": True, "seed": 5}
    reply = world.client().post("/v1/completions", json=fields | {"n": 3, "best_of": 3}).json()
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
        body = {"prompt": prompt, "max_tokens": 9, "echo": True, "n": 2}
        whole = world.client().post("/v1/completions", json=body).json()
        assert [choice["text"] for choice in whole["choices"]] == ["47+85=" + text] * 2
        streamed = ["", ""]
        for event in events(world.client().post("/v1/completions", json=body | {"stream": True}).text):
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["text"]
        assert streamed == ["47+85=" + text] * 2


def test_a_text_keeps_the_space_between_its_prompt_and_itself(world: World) -> None:
    """Some tokenizers, such as that of Llama 2, decode the first word of a text without the space before it."""
    text, words = world.plain("47+85=", 9)[0], tokenizer()
    words.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(text[0], 1, 0)])
    assert words.decode(words(text)["input_ids"]) == text[1:]
    world.front.texts = TextTokens(words, 64)
    reply = world.client().post("/v1/completions", json={"prompt": "47+85=", "max_tokens": 9}).json()
    assert reply["choices"][0]["text"] == text


def expected_logprobs(world: World, count: int) -> tuple[list[int], list[int], list[list[float]]]:
    """The tokens after a prompt, their depths, and the log probabilities of all tokens at the place of each."""
    request = TextRequest(tuple(world.words("47+85=")["input_ids"]), count, STOP)
    tokens, depths = plainly(world.model, request, RAMPS)
    return tokens, depths, plain_logprobs(world.model, request, tokens, depths)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion_are_those_where_its_tokens_were_known(world: World, stream: bool) -> None:
    tokens, depths, known = expected_logprobs(world, 9)
    assert len(set(depths)) > 1
    body = {"prompt": "47+85=", "max_tokens": 9, "logprobs": 2, "stream": stream, "logit_bias": {}}
    reply = world.client().post("/v1/completions", json=body)
    choices = [event["choices"][0] for event in (events(reply.text) if stream else [reply.json()])]
    logprobs = {
        name: [each for choice in choices for each in choice["logprobs"][name]] for name in choices[0]["logprobs"]
    }
    texts = [world.texts.token_text(token) for token in tokens]
    assert logprobs["tokens"] == texts
    assert logprobs["blocks"] == depths
    assert logprobs["text_offset"] == [len(world.texts.text_of(tokens[:place])) for place in range(len(texts))]
    assert logprobs["token_logprobs"] == pytest.approx([row[token] for row, token in zip(known, tokens, strict=True)])
    for top, row, token in zip(logprobs["top_logprobs"], known, tokens, strict=True):
        best = {*sorted(range(len(row)), key=lambda each: -row[each])[:2], token}
        assert top == pytest.approx({world.texts.token_text(each): row[each] for each in best})


def test_the_text_of_a_token_is_decoded_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, decode = list[object](), world.words.decode
    monkeypatch.setattr(world.words, "decode", lambda tokens, **options: decoded.append(tokens) or decode(tokens))
    first = [world.texts.token_text(token) for token in (4, 5, 4)]
    assert [world.texts.token_text(token) for token in (4, 5, 4)] == first
    assert len(decoded) == 4  # each alone, and after itself


def test_answers_with_log_probabilities_are_written_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, answer = list[bool](), TextReply.answer

    def noted(self: TextReply, pieces: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            beside.append(True)
        else:
            beside.append(False)
        return answer(self, pieces)

    monkeypatch.setattr(TextReply, "answer", noted)
    for more in ({}, {"logprobs": 2}):
        body = {"prompt": "47+85=", "max_tokens": 4} | more
        assert world.client().post("/v1/completions", json=body).status_code == 200
    assert beside == [False, True]


def test_a_prompt_of_tokens_is_decoded_once_for_all_its_texts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, text_of = list[object](), world.texts.text_of
    monkeypatch.setattr(world.texts, "text_of", lambda tokens: decoded.append(tokens) or text_of(tokens))
    body = {"prompt": world.words("47+85=")["input_ids"], "max_tokens": 2, "echo": True, "n": 3}
    assert len(world.client().post("/v1/completions", json=body).json()["choices"]) == 3
    assert len(decoded) == 1


def test_log_probabilities_of_a_chat(world: World) -> None:
    tokens, depths, known = expected_logprobs(world, 6)
    body = {"messages": [{"role": "user", "content": "47 + 85"}], "max_tokens": 6, "logprobs": True}
    for count in (0, 3):
        answer = world.client().post("/v1/chat/completions", json=body | {"top_logprobs": count}).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert [each["block"] for each in content] == depths
        for each, row, token in zip(content, known, tokens, strict=True):
            text = world.texts.token_text(token)
            assert (each["token"], each["bytes"]) == (text, list(text.encode()))
            assert each["logprob"] == pytest.approx(row[token])
            assert [other["logprob"] for other in each["top_logprobs"]] == pytest.approx(sorted(row)[::-1][:count])


def test_openais_client_reads_log_probabilities_and_several_texts(world: World) -> None:
    with OpenAI(base_url="http://testserver/v1", api_key="none", http_client=world.client()) as client:
        completion = client.completions.create(model="tiny", prompt="47+85=", max_tokens=5, logprobs=2, n=2)
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "47+85"}], max_tokens=5, logprobs=True, top_logprobs=2
        )
    tokens, _, known = expected_logprobs(world, 5)
    wanted = pytest.approx([row[token] for row, token in zip(known, tokens, strict=True)])
    assert [choice.logprobs and choice.logprobs.token_logprobs for choice in completion.choices] == [wanted] * 2
    logprobs = chat.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert [each.logprob for each in logprobs.content] == wanted
    assert [len(each.top_logprobs) for each in logprobs.content] == [2] * len(tokens)


def test_what_changes_logits_changes_the_text(world: World) -> None:
    text, _, _ = world.plain("47+85=", 12)
    (first,) = world.words(text[0])["input_ids"]

    def written(**fields: Any) -> str:
        body = {"prompt": "47+85=", "max_tokens": 12, "ignore_eos": True} | fields
        return str(world.client().post("/v1/completions", json=body).json()["choices"][0]["text"])

    assert text[0] not in written(logit_bias={str(first): -100})
    assert set(written(logit_bias={str(first): 100})) == {text[0]}
    assert len(set(written(presence_penalty=2, frequency_penalty=2))) > len(set(written()))
    assert written(repetition_penalty=1.0) == written() != written(repetition_penalty=2.0)
    world.front.defaults = GenerationDefaults(repetition_penalty=2.0)
    assert written() == written(repetition_penalty=2.0)


def drawn(world: World, **fields: Any) -> str:
    body = {"prompt": "47+85=", "max_tokens": 12, "ignore_eos": True, "temperature": 2.0} | fields
    reply = world.client().post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_without_a_seed_each_request_draws_anew_and_with_one_the_same_again(world: World) -> None:
    assert len({drawn(world) for _ in range(3)}) > 1
    assert len({drawn(world, seed=3) for _ in range(2)}) == 1
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
    assert len({drawn(world, temperature=None) for _ in range(3)}) > 1
    assert {drawn(world, temperature=None, top_k=1) for _ in range(2)} == {greedy}
    body = {"prompt": "47+85=", "max_tokens": None, "ignore_eos": True}
    assert world.client().post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5


def test_a_text_ends_as_config_json_says_where_the_generation_config_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    for generation, ends in (('{"temperature": 0.5}', {7, 8}), ('{"eos_token_id": 0}', {0})):
        (tmp_path / "generation_config.json").write_text(generation)
        assert stop_tokens(tmp_path) == ends


@pytest.mark.parametrize(
    ("generation", "warned"),
    [('{"num_beams": 4, "no_repeat_ngram_size": 2}', "num_beams, no_repeat_ngram_size"), ('{"num_beams": 1}', "")],
)
def test_settings_of_generate_that_are_not_followed_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generation: str, warned: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    (tmp_path / "generation_config.json").write_text(generation)
    check_decoder(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'generation_config.json'}: {warned}: not followed, so texts differ from those of generate()"
    ] * bool(warned)


def test_a_generation_config_that_is_wrong_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(UserError, match=r"generation_config.json: temperature: Input should be a valid number"):
        check_decoder(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "sentence"),
    [
        (
            "{}",
            '{"eos_token_id": -1}',
            r"generation_config.json: eos_token_id.0: Input should be greater than or equal",
        ),
        ('{"eos_token_id": [2, -1]}', "", r"config.json: eos_token_id.1: Input should be greater than or equal to 0"),
        ("{}", '{"eos_token_id": [1, 32]}', r"eos_token_id is 32: the model knows 32 tokens"),
        ('{"eos_token_id": 32}', "", r"eos_token_id is 32: the model knows 32 tokens"),
    ],
)
def test_an_end_that_no_text_can_have_is_refused(tmp_path: Path, config: str, generation: str, sentence: str) -> None:
    about = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 32} | json.loads(config)
    (tmp_path / "config.json").write_text(json.dumps(about))
    if generation:
        (tmp_path / "generation_config.json").write_text(generation)
    with pytest.raises(UserError, match=sentence):
        check_decoder(tmp_path)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_without_a_limit_a_text_ends_where_the_model_reads_no_further(world: World, path: str) -> None:
    prompt = {"prompt": "1" * 60} if path == "completions" else {"messages": [{"role": "user", "content": "1" * 59}]}
    reply = world.client().post(f"/v1/{path}", json=prompt | {"ignore_eos": True})
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 4), reply.text
    reply = world.client().post(f"/v1/{path}", json=prompt | {"max_tokens": 16})
    assert (reply.status_code, "max_tokens is 16: the model reads 64" in reply.text) == (400, True), reply.text


def test_a_text_ends_neither_before_its_least_tokens_nor_where_its_end_is_ignored(world: World) -> None:
    _, _, count = world.plain("3+4=", 40)
    assert count < 40, "this prompt shows nothing: its text does not end by itself"

    def usage(**fields: Any) -> tuple[int, str]:
        answer = world.client().post("/v1/completions", json={"prompt": "3+4=", "max_tokens": 40} | fields).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert usage() == (count, "stop")
    assert usage(min_tokens=count)[0] > count
    assert usage(ignore_eos=True) == (40, "length")
    assert usage(ignore_eos=True, stop=["nothing", END]) == (count, "stop"), "a token that is not shown"
