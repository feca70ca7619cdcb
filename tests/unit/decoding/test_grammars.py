"""Texts that are JSON by a schema: with exits and without, tokens are chosen among those that keep to it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from jsonschema import validate

from isobatch.deployments.decoding.grammars import Grammars, grammar_of
from isobatch.deployments.decoding.openai_requests import CompletionRequest, request_of
from isobatch.deployments.decoding.ramp_rules import GenerationDefaults
from isobatch.deployments.decoding.sequences import Sampling, TextRequest
from tests.helpers.decoder_world import STOP, World
from tests.helpers.tiny_decoders import decoder, engine, plainly, written_by

END, SIZE = "<end>", 257  # the token that ends a text, and one for each byte
COLOURS = {"enum": ["red", "rust", 12]}
SPELLED = ('"red"', '"rust"', "12")
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "of": COLOURS},
    "required": ["sure", "of"],
    "additionalProperties": False,
}


def letters() -> Any:
    """A tokenizer with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=END)


def allowed(written: tuple[int, ...]) -> set[int]:
    """What may follow in one of the spelled colours."""
    so_far, tokens = letters().decode(list(written)), letters().get_vocab()
    rest = [each.removeprefix(so_far) for each in SPELLED if each.startswith(so_far)]
    return {tokens[each[0]] if each else 0 for each in rest}


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(letters(), SIZE, STOP)


def test_only_tokens_that_keep_to_the_grammar_have_a_probability(grammars: Grammars) -> None:
    """Whatever the order in which texts are asked about."""
    sampling, words = Sampling(grammar=grammar_of(COLOURS)), letters()
    texts = ["", '"r', '"', "1", '"red', '"red"', '"ru', "12", '"r']
    written = [tuple(words(each)["input_ids"]) for each in texts]
    logits = torch.randn(len(texts) + 1, SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    grammars.apply(logits, [*((sampling, each) for each in written), (Sampling(), written[1])])
    for row, each in enumerate(written):
        kept = sorted(allowed(each))
        assert logits[row].isfinite().nonzero()[:, 0].tolist() == kept, texts[row]
        assert torch.equal(logits[row, kept], before[row, kept])
    assert torch.equal(logits[-1], before[-1]), "this text follows no grammar"


def test_each_text_of_a_launch_keeps_its_matcher_however_many_there_are(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a text again from its beginning takes many times as long as its next token."""
    import llguidance

    made, matcher = list[str](), llguidance.LLMatcher

    def counted(tokenizer: Any, grammar: str, **options: Any) -> Any:
        made.append(grammar)
        return matcher(tokenizer, grammar, **options)

    grammar = grammar_of(COLOURS)
    monkeypatch.setattr(llguidance, "LLMatcher", counted)
    for text in ("", '"', '"r'):
        written = tuple(letters()(text)["input_ids"])
        grammars.apply(torch.zeros(300, SIZE), [(Sampling(grammar=grammar, seed=seed), written) for seed in range(300)])
    assert len(made) == 300


def test_a_pattern_that_would_hold_up_a_replica_ends_its_text(grammars: Grammars) -> None:
    sampling = Sampling(grammar=grammar_of({"type": "string", "pattern": "^(a{300}){300}$"}))
    for text, end in (("", False), ('"', True)):
        logits = torch.zeros(1, SIZE)
        grammars.apply(logits, [(sampling, tuple(letters()(text)["input_ids"]))])
        assert bool(logits[0, 0].isfinite()) is end


@pytest.mark.parametrize("verified", [False, True])
def test_exits_choose_among_the_same_tokens(grammars: Grammars, verified: bool) -> None:
    model, ramps = decoder(vocab_size=SIZE), {0: 0.6, 2: 0.6}
    sampling = Sampling(grammar=grammar_of(COLOURS))
    body = [TextRequest((1, 2, 3 + number), 9, STOP, sampling) for number in range(4)]
    running = engine(model, ramps, verified, pages=8, grammars=grammars)  # so few that texts begin again
    result = written_by(running, body)
    plain = [plainly(model, each, {} if verified else ramps, allowed=allowed) for each in body]
    assert [tokens for tokens, _ in result.values()] == [tokens for tokens, _ in plain]
    assert {letters().decode(tokens[:-1]) for tokens, _ in plain} <= set(SPELLED)
    assert all(0 in depths for _, depths in result.values()), "what must come is sure at the first ramp"


@pytest.fixture
def world() -> Iterator[World]:
    made = World(decoder(vocab_size=SIZE), letters())
    yield made
    made.loop.end()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_json_over_http(world: World, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "colours", "strict": True, "schema": SCHEMA}}
    body = {"prompt": "a", "max_tokens": 40, "n": 3, "temperature": temperature, "response_format": wanted}
    choices = world.client().post("/v1/completions", json=body).json()["choices"]
    ended = [each["text"] for each in choices if each["finish_reason"] == "stop"]
    for text in ended:
        validate(json.loads(text), SCHEMA)
    assert all(each["text"].startswith("{") for each in choices)
    assert len(ended) == 3
    body["response_format"] = {"type": "json_object"}
    for each in world.client().post("/v1/completions", json=body).json()["choices"]:
        assert each["text"].startswith("{")


@pytest.mark.parametrize(
    ("wanted", "others", "sentence"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}, {}, "response_format = an object: Inv"),
        ({"type": "json_schema", "json_schema": {"schema": {"title": "a" * 2**14}}}, {}, "at most 16384 characters"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 10007}}},
            {},
            "the numbers in multipleOf must have a common multiple of at most 10,000, without decimal point",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"schema": {"allOf": [{"multipleOf": 0.97}, {"multipleOf": 890.3}]}},
            },
            {},
            "the numbers in multipleOf must have a common multiple of at most 10,000, without decimal point",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {}, "no JSON ends by this schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"type": "string", "pattern": "a"}] * 9}}},
            {},
            "the schema has 9 patterns: 8 are allowed where several may be for one text",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"schema": {"patternProperties": {f"^{n}$": {} for n in range(33)}}},
            },
            {},
            "the schema has 33 patternProperties: 32 are allowed",
        ),
        ({"type": "json_schema"}, {}, "response_format.json_schema is missing"),
        ({"type": "grammar"}, {}, "response_format = an object: must be an object whose"),
        ({"type": "json_object"}, {"ignore_eos": True}, "such a text ends with its JSON: leave out min_tokens"),
        ({"type": "json_object"}, {"min_tokens": 2}, "such a text ends with its JSON: leave out min_tokens"),
    ],
)
def test_what_cannot_be_followed_is_refused(world: World, wanted: Any, others: Any, sentence: str) -> None:
    body = {"prompt": "a", "response_format": wanted, **others}
    world.front.config = world.front.config.model_copy(update={"max_body_bytes": 2**20})
    reply = world.client().post("/v1/completions", json=body)
    assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (400, True), reply.text


ITSELF: dict[str, Any] = {"$ref": "#"}
WITH_A: dict[str, Any] = {"type": "object", "required": ["a"]}
ENDLESS: list[dict[str, Any]] = [
    ITSELF,
    {"$id": "http://a/b", "$ref": "http://a/b"},
    {"anyOf": [ITSELF, ITSELF]},
    WITH_A | {"properties": {"a": ITSELF}},
    WITH_A | {"additionalProperties": ITSELF},
    {"allOf": [WITH_A | {"properties": {"a": ITSELF}}]},
    {"type": "array", "items": ITSELF, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "null"}, ITSELF], "minItems": 2},
    {
        "$ref": "#/$defs/a~1b",
        "$defs": {"a/b": {"anyOf": [{"$ref": "#/$defs/c"}]}, "c": WITH_A | {"properties": {"a": ITSELF}}},
    },
]
ENDING: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": ITSELF}},
    {"type": ["object", "null"], "required": ["a"], "properties": {"a": ITSELF}},
    WITH_A | {"properties": {"a": {"anyOf": [ITSELF, {"type": "null"}]}}},
    WITH_A | {"properties": {"b": ITSELF}},
    WITH_A | {"properties": {"$ref": ITSELF}},
    {"type": "array", "items": ITSELF},
    {"type": "array", "prefixItems": [{"type": "null"}, ITSELF], "minItems": 1},
    {"$ref": "#/$defs/a%25", "$defs": {"a%": {"type": "null"}, "b": {"properties": 5}}},
    {"$ref": "#a", "$defs": {"b": {"$anchor": "a", "const": ITSELF}}},
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_whose_json_would_never_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"its \$ref leads to itself"):
        grammar_of(schema)


@pytest.mark.parametrize("schema", ENDING)
def test_a_schema_may_contain_itself_where_its_json_can_end(schema: dict[str, Any]) -> None:
    assert grammar_of(schema)


def test_a_schema_is_compiled_once() -> None:
    for wanted in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}):
        body = request_of(CompletionRequest, {"prompt": "a", "response_format": wanted})
        sampling = body.terms(GenerationDefaults()).sampling
        assert body.response_format
        assert sampling.grammar is body.response_format.grammar


def test_a_tokenizer_that_is_not_understood_is_named() -> None:
    from experiments.demos.sums import tokenizer

    assert "llguidance cannot read the model's tokenizer" in Grammars(tokenizer(), 23, STOP).obstacle
    assert Grammars(letters(), SIZE, ()).obstacle == "the model has no token that ends a text"
    assert Grammars(None, SIZE, STOP).obstacle.endswith("Only fast tokenizers are supported"), "a front starts anyway"


def test_a_front_knows_from_its_start_why_texts_cannot_be_json(world: World) -> None:
    world.front.no_grammars = "the tokenizer is odd"
    reply = world.client().post("/v1/completions", json={"prompt": "a", "response_format": {"type": "json_object"}})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "response_format: the tokenizer is odd")


@pytest.mark.parametrize("step", [0.01, -0.25, 500, 100_000])
def test_usual_numbers_have_multiples(step: float) -> None:
    """A matcher is made between two launches, in a time that grows with the number: it would hold up all texts."""
    schema = {"type": "object", "properties": {"multipleOf": {"type": "number", "multipleOf": step}}}
    assert grammar_of(schema)
    for other in ({"multipleOf": 1009}, {"multipleOf": 0, "not": {"multipleOf": 10_007}}):
        with pytest.raises(ValueError, match="the numbers in multipleOf must have a common multiple of at most 10,000"):
            grammar_of({"allOf": [{"multipleOf": 13}, schema, other]})
    with pytest.raises(ValueError, match=r"^(?!the numbers)"):
        grammar_of({"multipleOf": True})
