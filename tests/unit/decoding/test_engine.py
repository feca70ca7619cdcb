"""Batched decoding with exits writes what plain decoding does: one sequence alone, the whole prefix for each token."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.decoding.scheduler import DecodingLimits
from deployments.decoding.sequences import Sampling, Wanted
from tests.helpers.tiny_decoders import VOCABULARY, decoder, engine, plainly, written_by

PATIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}

prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=10).map(tuple)
samplings = st.one_of(
    st.just(Sampling()),
    st.builds(Sampling, st.sampled_from([0.5, 1.0]), st.sampled_from([0.3, 1.0]), st.integers(0, 3)),
)
requests = st.builds(
    Wanted, prompts, st.integers(1, 6), st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2), samplings
)
thresholds = st.dictionaries(st.integers(0, 2), st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.1]), max_size=3)
limits = st.builds(
    DecodingLimits,
    max_residents=st.integers(1, 6),
    page_tokens=st.sampled_from([1, 3, 4]),
    deep_share=st.sampled_from([0.01, 0.5, 1.0]),
    prompt_rows=st.sampled_from([1, 3, 64]),
    ttft_s=st.just(1e9),
    tpot_s=st.just(1e9),
)
models = st.builds(decoder, st.just("llama"), st.integers(0, 2), st.booleans(), st.sampled_from([1, 2, 4]))


@settings(max_examples=20, **PATIENT)
@given(models, thresholds, st.lists(requests, min_size=1, max_size=6), limits, st.integers(1, 6), st.integers(0, 200))
def test_recompute_writes_what_plain_decoding_with_exits_writes(
    model: Any, ramps: dict[int, float], asked: list[Wanted], within: DecodingLimits, pending: int, scarce: int
) -> None:
    """Whoever shares launches, however prompts are cut, and however often pages run out."""
    enough = max(4 * -(-(len(one.prompt) + one.max_tokens) // within.page_tokens) for one in asked)
    running = engine(model, ramps, pages=enough + scarce, max_pending=pending, limits=within)
    assert written_by(running, asked) == {place: plainly(model, one, ramps) for place, one in enumerate(asked)}
    assert running.scheduler.pool.free == enough + scarce
    assert not running._network._pending  # type: ignore[attr-defined]


@settings(max_examples=20, **PATIENT)
@given(models, thresholds, st.lists(requests, min_size=1, max_size=6), limits, st.integers(1, 6), st.integers(0, 200))
def test_verified_writes_what_the_full_network_writes(
    model: Any, ramps: dict[int, float], asked: list[Wanted], within: DecodingLimits, pending: int, scarce: int
) -> None:
    enough = max(4 * -(-(len(one.prompt) + one.max_tokens) // within.page_tokens) for one in asked)
    running = engine(model, ramps, verified=True, pages=enough + scarce, max_pending=pending, limits=within)
    found = written_by(running, asked)
    assert {place: tokens for place, (tokens, _) in found.items()} == {
        place: plainly(model, one, {})[0] for place, one in enumerate(asked)
    }
    assert running.scheduler.pool.free == enough + scarce
    assert not running._network._pending  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_families_that_are_shaped_like_llama(family: str) -> None:
    model, ramps = decoder(family), {0: 0.3, 2: 0.3}
    asked = [Wanted((1, 2, 3), 6), Wanted((4,), 6), Wanted(tuple(range(20)), 6)]
    found = written_by(engine(model, ramps), asked)
    assert found == {place: plainly(model, one, ramps) for place, one in enumerate(asked)}
