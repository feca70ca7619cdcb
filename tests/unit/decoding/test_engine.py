"""Batched decoding with exits writes what plain decoding does: one sequence alone, the whole prefix for each token."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.scheduler import DecodingLimits
from isobatch.deployments.decoding.sequences import Sampling, Splits, TextRequest
from tests.helpers.tiny_decoders import BLOCKS, VOCABULARY, decoder, engine, plain_logprobs, plainly, t5, written_by

Asked = tuple[Any, list[TextRequest]]  # a network, and what it is asked for
PATIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def with_encoder(request: TextRequest) -> TextRequest:
    """The same of a T5, whose encoder reads the prompt."""
    return replace(request, prompt=(0,), source=request.prompt)


def enough(asked: list[TextRequest], within: DecodingLimits) -> int:
    """Pages for any one of these."""

    def pages(positions: int) -> int:
        return -(-positions // within.page_tokens)

    return max(pages(len(one.prompt) + one.max_tokens) + pages(len(one.source)) for one in asked)


def generated(model: Any, request: TextRequest) -> list[int]:
    """What transformers' `generate` writes."""
    source, stop = torch.tensor([request.source]), sorted(request.stop) or None
    fields = {"eos_token_id": stop, "pad_token_id": 0, "do_sample": False, "use_cache": False}
    fields |= {"max_new_tokens": request.max_tokens, "min_new_tokens": min(request.min_tokens, request.max_tokens)}
    fields["repetition_penalty"] = request.sampling.repetition
    with torch.inference_mode():
        return list(model.generate(source, **fields)[0, 1:].tolist())


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=10).map(tuple)
samplings = st.one_of(
    st.just(Sampling()),
    st.builds(
        Sampling, st.sampled_from([0.5, 1.0]), st.sampled_from([0.3, 1.0]), st.integers(0, 3), st.sampled_from([0, 3]),
        st.sampled_from([0.0, 0.2]),
    ),
    st.builds(
        Sampling, bias=st.sampled_from([(), ((3, 1.0), (5, -2.0))]), presence=st.sampled_from([0.0, 1.0]),
        frequency=st.sampled_from([0.0, 0.5]), repetition=st.sampled_from([1.0, 1.5]),
        alternatives=st.sampled_from([None, 2]),
    ),
)  # fmt: skip
stops = st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2)
requests = st.builds(TextRequest, prompts, st.integers(1, 6), stops, samplings, min_tokens=st.integers(0, 4))
thresholds = st.dictionaries(st.integers(0, 2), st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.1]), max_size=3)
limits = st.builds(
    DecodingLimits, max_residents=st.integers(1, 6), page_tokens=st.sampled_from([1, 3, 4]),
    deep_share=st.sampled_from([0.01, 0.5, 1.0]), prompt_rows=st.sampled_from([1, 3, 64]),
    ttft_s=st.just(1e9), tpot_s=st.just(1e9),
)  # fmt: skip
llamas = st.builds(decoder, st.just("llama"), st.integers(0, 2), st.booleans(), st.sampled_from([1, 2, 4]))
t5s = st.builds(t5, st.sampled_from(["t5", "mt5"]), st.integers(0, 1), st.booleans(), st.booleans())
asked_of_llamas = st.tuples(llamas, st.lists(requests, min_size=1, max_size=6))
asked_of_t5s = st.tuples(t5s, st.lists(requests.map(with_encoder), min_size=1, max_size=6))
either = asked_of_llamas | asked_of_t5s


@pytest.mark.parametrize("way", ["recompute", "verified", "project"])
@settings(max_examples=12, **PATIENT)
@given(either, thresholds, limits, st.integers(1, 6), st.integers(0, 200), st.integers(0, 5), st.booleans())
def test_each_way_writes_what_plain_decoding_writes(
    way: str, told: Asked, ramps: dict[int, float], within: DecodingLimits, pending: int, scarce: int, lost: int,
    full: bool,
) -> None:  # fmt: skip
    """Whoever shares launches, however prompts are cut, and however often pages run out: `recompute` and `project` with
    exits (and with projected KV, also when a replica is lost after some tokens), `verified` as the full network, and so
    does each for a text that asks for it."""
    model, texts = told[0], [replace(one, full=full and not place) for place, one in enumerate(told[1])]
    pages = enough(texts, within) + scarce
    verified, project = way == "verified", way == "project"
    running = engine(model, ramps, verified, pages, pending, within, project)
    result = written_by(running, texts)
    used = [{} if verified or one.full else ramps for one in texts]
    plain = {place: plainly(model, one, used[place], project, claimed=result[place]) for place, one in enumerate(texts)}
    assert result == plain if not verified else all(result[place][0] == plain[place][0] for place in plain)
    if project:
        left = {place: _continued(one, *plain[place], lost) for place, one in enumerate(texts)}
        rest = {place: one for place, one in left.items() if one}
        again = written_by(running, list(rest.values()))
        assert list(again.values()) == [tuple(each[lost:] for each in plain[place]) for place in rest]
    all_is_free(running, pages)


def all_is_free(running: Engine, pages: int) -> None:
    """Of its pages, and of what it remembers of positions that the deep part has not run."""
    assert running.scheduler.pool.free == pages
    assert not running.network._pending  # type: ignore[attr-defined]


changes = st.lists(st.tuples(st.integers(1, 6), st.frozensets(st.integers(0, 2)), limits), max_size=4)


@settings(max_examples=15, **PATIENT)
@given(either, thresholds, limits, changes, st.booleans(), st.integers(0, 200))
def test_an_engine_that_is_led_elsewhere_while_it_writes_loses_and_changes_no_token(
    told: Asked, ramps: dict[int, float], within: DecodingLimits,
    moves: list[tuple[int, frozenset[int], DecodingLimits]], verified: bool, scarce: int,
) -> None:  # fmt: skip
    """To other cuts and limits, after so many launches each: a token is what those ramps say that it was written under,
    and `verified` writes what the full network writes."""
    model, texts = told
    pages = enough(texts, within) + scarce
    running = engine(model, ramps, verified=verified, pages=pages, limits=within)
    names = [running.open(each) for each in texts]
    result = {name: ([], []) for name in names}
    under: dict[Any, list[dict[int, float]]] = {name: [] for name in names}
    now, left = ramps, list(moves)
    for number in count(1):
        if left and number % left[0][0] == 0:
            _, kept, limits_now = left.pop(0)
            now = {block: ramps[block] for block in kept & ramps.keys()}
            running.recut(Splits((*(block + 1 for block in sorted(now)), BLOCKS), verified, 4), limits_now)
        if (written := running.step()) is None:
            break
        for each in written:
            result[each.name][0].extend(each.tokens)
            result[each.name][1].extend(each.depths)
            under[each.name] += [now] * len(each.tokens)
    for name, one in zip(names, texts, strict=True):
        plain = plainly(model, one, {} if verified else under[name].__getitem__, claimed=result[name])
        assert result[name] == plain if not verified else result[name][0] == plain[0]
    all_is_free(running, pages)


def _continued(request: TextRequest, tokens: list[int], depths: list[int], lost: int) -> TextRequest | None:
    """What another replica is asked once so many tokens are written; None where these were all."""
    if lost >= len(tokens):
        return None
    more = replace(request, prompt=(*request.prompt, *tokens[:lost]), max_tokens=request.max_tokens - lost)
    return replace(more, replayed=tuple(depths[:lost]))


@settings(max_examples=5, **PATIENT)
@given(t5s, st.lists(requests.map(with_encoder), min_size=1, max_size=6), thresholds, limits)
def test_a_t5_without_exits_or_verified_writes_what_generate_writes(
    model: Any, asked: list[TextRequest], ramps: dict[int, float], within: DecodingLimits
) -> None:
    greedy = [replace(one, sampling=Sampling(repetition=one.sampling.repetition)) for one in asked]
    results = [generated(model, one) for one in greedy]
    pages = sum(enough([one], within) for one in greedy)
    assert engine(model, {}, pages=pages, limits=within).write_all(greedy) == results
    assert engine(model, ramps, verified=True, pages=pages, limits=within).write_all(greedy) == results


@pytest.mark.parametrize("exits", ["off", "recompute", "verified", "project"])
def test_log_probabilities_are_those_of_the_block_that_wrote_or_checked_a_token(exits: str) -> None:
    """However often pages run out."""
    model, ramps = decoder(), {} if exits == "off" else {0: 0.3, 2: 0.3}
    texts = [TextRequest((1, 2, 3), 8, sampling=Sampling(alternatives=2)), TextRequest((4,), 8)]
    running = engine(model, ramps, exits == "verified", pages=4, project=exits == "project")
    first, other = (running.open(each) for each in texts)
    written: list[Any] = []
    while (news := running.step()) is not None:
        written += news
    tokens, depths, logprobs = (
        [each for new in written if new.name == first for each in getattr(new, name)]
        for name in ("tokens", "depths", "logprobs")
    )
    assert not any(new.logprobs for new in written if new.name == other)
    blocks = [BLOCKS - 1] * 8 if exits == "verified" else depths
    assert [each.block for each in logprobs] == blocks
    known = plain_logprobs(model, texts[0], tokens, blocks)
    if exits == "project":  # later states are others
        known, tokens, logprobs = known[:1], tokens[:1], logprobs[:1]
    for each, token, row in zip(logprobs, tokens, known, strict=True):
        assert each.logprob == pytest.approx(row[token])
        assert [logprob for _, logprob in each.best] == pytest.approx(sorted(row)[::-1][:2])
        assert [row[other] for other, _ in each.best] == pytest.approx(sorted(row)[::-1][:2])


def test_an_encoder_reads_each_source_once_unless_its_sequence_begins_again() -> None:
    """As many as a launch has room for, and a longer one alone."""
    model, reads = t5(), []
    texts = [with_encoder(TextRequest((1, 2, 3) * length, 6)) for length in (1, 1, 1, 5, 1)]
    plain = {place: plainly(model, one, {0: 0.3}) for place, one in enumerate(texts)}
    hook = model.encoder.register_forward_hook(lambda _, __, out: reads.append(len(out[0])))
    try:
        running = engine(model, {0: 0.3}, limits=DecodingLimits(page_tokens=4, prompt_rows=7, ttft_s=1e9, tpot_s=1e9))
        assert written_by(running, texts) == plain
    finally:
        hook.remove()
    assert reads == [2, 2, 1]


FEW = {"sliding_window": 5}  # positions that a row attends to
EVERY_SECOND = {"layer_types": ("full_attention", "sliding_attention") * 2}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}  # so low that they matter
FAMILIES = (
    ("mistral", {}), ("mistral", FEW), ("qwen2", {}), ("qwen2", FEW | EVERY_SECOND | {"use_sliding_window": True}),
    ("qwen3", {}), ("smollm3", {}), ("phi3", {}), ("phi3", FEW), ("phi3", {"partial_rotary_factor": 0.67}),
    ("gemma2", FEW | CAPS), ("gemma2", FEW | CAPS | {"query_pre_attn_scalar": 9, "attn_logit_softcapping": None}),
    ("gemma3_text", FEW | EVERY_SECOND), ("gemma3_text", FEW | EVERY_SECOND | {"query_pre_attn_scalar": 9}),
)  # fmt: skip


@pytest.mark.parametrize(("family", "others"), FAMILIES)
def test_families_that_are_shaped_like_llama(family: str, others: dict[str, Any]) -> None:
    model, ramps = decoder(family, **others), {0: 0.3, 2: 0.3}
    texts = [TextRequest((1, 2, 3), 6), TextRequest((4,), 6), TextRequest(tuple(range(20)), 6)]
    for project in (False, True):
        result = written_by(engine(model, ramps, project=project), texts)
        plain = [plainly(model, one, ramps, project, claimed=result[place]) for place, one in enumerate(texts)]
        assert list(result.values()) == plain
    written = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert engine(model, {}).write_all(texts[:1]) == [written[0, 3:].tolist()]
