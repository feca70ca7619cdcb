"""Networks that label words: the answers are transformers' own, wherever they are cut and whoever is beside a text."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch import load
from isobatch.deployments.exits import Decision
from isobatch.deployments.models import TorchModel
from isobatch.deployments.models.departures import TokenDepartures
from isobatch.deployments.models.encode import ANSWERED_TOKENS
from isobatch.deployments.models.families import family_of
from isobatch.deployments.models.loading import anatomy_of_task
from isobatch.deployments.models.onnx_model import OnnxModel
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps, make_head
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.tasks import TOKENS
from isobatch.deployments.transport.orders import Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import NOBODY, Batch, Exits
from tests.helpers.backend_parity import assert_as_alone, run_in_splits
from tests.helpers.cascade_directories import edit
from tests.helpers.tiny_networks import NUM_LABELS, TEXT, VOCABULARY, NoEncoder, _config, padded
from tests.helpers.tiny_words import word_network


def network(name: str, most_unsure: int = 0) -> tuple[TorchModel, Any]:
    """A random network of this family, with random ramps, and Hugging Face's own."""
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(len(name))
    model = AutoModelForTokenClassification.from_config(_config(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    anatomy = anatomy_of_task(model, family_of(model.config.model_type), TOKENS)
    blocks = range(len(anatomy.blocks) - 1)
    rules = ExitRules(
        policy="isobatch.deployments.exits:confidence",
        ramps=tuple(RampRule(block=block, threshold=0.45) for block in blocks),
        most_unsure=most_unsure,
    )
    heads = {block: make_head("light", anatomy.pooled_widths[block], NUM_LABELS).eval() for block in blocks}
    cut = TorchModel(anatomy, NoEncoder(), Ramps(rules, heads), ["a", "b", "c"], torch.device("cpu"), torch.float32)
    return cut, model


def texts(count: int, seed: int) -> list[Batch]:
    random = np.random.default_rng(seed)
    result = []
    for length in random.integers(1, 12, count):
        arrays = {"input_ids": random.integers(2, VOCABULARY, length), ANSWERED_TOKENS: random.random(length) < 0.6}
        result.append(Batch(0, arrays, np.zeros((1, 0), np.float32), np.array([length])))
    return result


def parts_of(exits: Exits) -> list[np.ndarray]:
    """The logits of each text's words."""
    return np.split(exits.logits, np.cumsum(exits.counts)[:-1])


@pytest.mark.parametrize("name", TEXT)
def test_without_exits_the_answers_are_transformers_own_wherever_it_is_cut(name: str) -> None:
    cut, whole = network(name)
    batch = cut.merge(texts(7, seed=3))
    given = padded(torch.as_tensor(batch.arrays["input_ids"]), batch.lengths)
    with torch.inference_mode():
        logits = whole(**given).logits
    expected = logits[given["attention_mask"].bool()].numpy()[np.asarray(batch.arrays[ANSWERED_TOKENS])]
    starts = np.cumsum(batch.lengths) - batch.lengths
    words = np.add.reduceat(np.asarray(batch.arrays[ANSWERED_TOKENS]).astype(int), starts)
    for stop in range(1, cut.num_blocks):
        exits = run_in_splits(cut, batch, [stop])
        assert np.abs(exits.logits - expected).max() < 1e-5
        assert (exits.counts == words).all()


@settings(max_examples=12)
@given(
    name=st.sampled_from(["bert", "distilbert", "modernbert"]), seed=st.integers(0, 99), data=st.data(),
    most_unsure=st.integers(0, 2),
)  # fmt: skip
def test_a_text_has_what_it_has_alone_in_company(name: str, seed: int, data: st.DataObject, most_unsure: int) -> None:
    model, _ = network(name, most_unsure)
    alone = texts(6, seed)
    expected = [model.run(each, model.num_blocks, model.ramp_blocks).exits for each in alone]
    order: list[int] = data.draw(st.permutations(range(6)))
    stops = [*sorted(data.draw(st.sets(st.integers(1, model.num_blocks - 1)))), model.num_blocks]
    assert_as_alone(model, model.merge([alone[row] for row in order]), order, expected, stops)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 999), most_unsure=st.integers(0, 3)
)
def test_a_text_leaves_when_few_words_are_unsure_and_one_sure(lengths: list[int], seed: int, most_unsure: int) -> None:
    random = np.random.default_rng(seed)
    wanted, sure = (random.random(sum(lengths)) < share for share in (0.7, 0.6))
    tokens = np.array(lengths), torch.from_numpy(wanted), most_unsure
    leaving = TokenDepartures(torch.zeros(len(lengths), 0), NUM_LABELS, NOBODY, *tokens)
    logits = torch.rand(sum(lengths), NUM_LABELS)
    leaving.note(2, Decision(torch.from_numpy(sure), logits, leaving.memory), may_leave=True)
    exits, staying = leaving.finish()
    assert sorted([*exits.rows, *staying]) == [*range(len(lengths))]
    assert np.array_equal(
        exits.logits, logits.numpy()[wanted & np.repeat(np.isin(range(len(lengths)), exits.rows), lengths)]
    )
    ends = np.cumsum(lengths)
    for row, end in enumerate(ends):
        own = slice(end - lengths[row], end)
        unsure = int((wanted[own] & ~sure[own]).sum())
        assert (row in exits.rows) == (unsure <= most_unsure and bool((wanted[own] & sure[own]).any()))


def test_a_text_that_is_kept_stays_inside_though_it_leaves() -> None:
    model, _ = network("bert", most_unsure=9)
    batch = model.merge(texts(5, seed=1))
    left = model.run(batch, 1, model.ramp_blocks).exits
    assert len(left) > 0
    kept = left.rows[:1]
    launched = model.run(batch, 1, model.ramp_blocks, kept)
    assert (launched.exits.rows == left.rows).all()
    assert len(launched.survivors) == len(batch) - len(left) + 1
    order = Order(model.num_blocks, frozenset(model.ramp_blocks), (pack(batch),), kinds=bytes([1, 0, 1, 0, 1]))
    replies = [reply for reply in SplitReplica(model).run(order) if hasattr(reply, "exits")]
    assert all(len(parts_of(each.exits)) == len(each.exits) for each in replies)


def test_onnx_gives_what_torch_gives(tmp_path: Path) -> None:
    model, _ = network("bert")
    other = OnnxModel(model, "words", cache=tmp_path)
    batch = model.merge(texts(5, seed=2))
    other.prepare([BlockRange(0, 2, (0, 1)), BlockRange(2, model.num_blocks)], batch)
    for count in (5, 3):
        some = model.select(batch, np.arange(count))
        here, there = model.run(some, 2, model.ramp_blocks), other.run(some, 2, model.ramp_blocks)
        assert (here.exits.rows == there.exits.rows).all()
        assert np.abs(here.exits.logits - there.exits.logits).max(initial=0.0) < 1e-4
        full, same = (one.run(each.survivors, 4, ()) for one, each in ((model, here), (other, there)))
        assert np.abs(full.exits.logits - same.exits.logits).max() < 1e-4
    assert not other.exported.requested


def entities(result: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(each["entity_group"], each["start"], each["end"], round(float(each["score"]), 5)) for each in result]


def test_entities_are_those_of_transformers_pipeline() -> None:
    from transformers import pipeline

    folder, texts = word_network(), ["ada bob saw romes.", "the oslon was in rome", "eve ada, of  rome", "unknown ada"]
    reference = pipeline("token-classification", model=str(folder), aggregation_strategy="first", device="cpu")
    model = load(folder)
    for text, answer in zip(texts, model.predict(texts), strict=True):
        output = TOKENS.output(answer, model.labels)
        assert entities(output["entities"]) == entities(reference(text))
        assert [text[each["start"] : each["end"]] for each in output["tokens"]] == [
            each["word"] for each in output["tokens"]
        ]


def test_words_that_are_given_are_answered_one_by_one() -> None:
    model = load(word_network())
    words = ["romes", "ada", "the.", "bob-eve"]
    (answer,) = model.predict([words])
    assert answer.words.numbers == (0, 1, 2, 3)
    assert [answer.words.text[a:b] for a, b in zip(answer.words.starts, answer.words.ends, strict=True)] == words
    (same,) = model.predict([" ".join(words[:2])])
    (given_,) = model.predict([words[:2]])
    assert same.label == given_.label


def test_a_text_that_is_too_long_answers_the_words_that_are_read() -> None:
    model = load(word_network())
    words = ["ada"] * 40
    batch = model.encode([words, ["bob"]])
    assert batch.truncated == {0}
    assert [len(each.numbers) for each in batch.words] == [22, 1]  # of 24 tokens two surround the text


def test_of_a_text_that_is_far_too_long_the_end_is_answered_where_the_tokenizer_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "left"
    shutil.copytree(word_network(), folder)
    edit(folder / "tokenizer_config.json", truncation_side="left")
    words = [*["ada"] * 600, *["bob"] * 30]
    (answered,) = load(folder).encode([words]).words
    assert answered.numbers == tuple(range(608, 630))
    assert {answered.text[at:end] for at, end in zip(answered.starts, answered.ends, strict=True)} == {"bob"}


def test_an_empty_text_has_no_words_and_an_answer() -> None:
    model = load(word_network())
    answers = model.predict(["", "ada"])
    assert answers[0].label == ()
    assert TOKENS.output(answers[0], model.labels) == {"tokens": [], "entities": []}


@pytest.mark.parametrize("wrong", [3, ["ada", 3], [], ["ada", ""], {"text": "ada"}])
def test_what_is_no_text_and_no_list_of_words_is_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match="text 1 must be a text or a list of words, got "):
        load(word_network()).encode(["ada", wrong])


def test_a_made_up_batch_knows_which_tokens_are_answered() -> None:
    cut, _ = network("bert")
    ran, through = list[tuple[int, int]](), cut.through
    cut.through = lambda block_range, arrays, spans: (
        ran.append((block_range.start, len(arrays["hidden"]))) or through(block_range, arrays, spans)
    )
    tokens = sum(len(each.arrays[ANSWERED_TOKENS]) for each in texts(3, 0))
    cut.warm_up(1, [2, cut.num_blocks], cut.ramp_blocks, cut.merge(texts(3, 0)))
    assert ran == [(1, tokens), (2, tokens)]
