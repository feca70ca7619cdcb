"""Prices of a decoder's launches: found again where they are known, and measured with the real engine."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, T5Config

from isobatch.cluster.profiling.launch_prices import (
    SETTINGS,
    TimedLaunch,
    estimated_table,
    fitted,
    front_s_per_token,
    measured,
)
from isobatch.deployments.decoding.anatomy import anatomy_of
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.engine_setup import engine_for
from isobatch.deployments.decoding.ramp_rules import DecoderRules
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.profiles.text_profile import PARTS, DecodingWorkload, LaunchSize
from tests.helpers.tiny_decoders import decoder, t5
from tests.helpers.tiny_tokenizers import save_tokenizer

WORKLOAD = DecodingWorkload(((1, 0.5),), (6, 3), (5, 8))


def test_prices_are_found_again() -> None:
    random = np.random.default_rng(0)
    price = LaunchSize(launches=1e-3, blocks=2e-4, rows=1e-5, read=1e-7, asked=3e-6)
    sizes = [LaunchSize(*random.integers(1, 50, len(PARTS)).astype(float).tolist()) for _ in range(1200)]
    noise = random.lognormal(0.0, 0.02, len(sizes))
    noise[::50] = 4.0  # the machine was busy with other things
    seconds = [sum(getattr(price, part) * getattr(size, part) for part in PARTS) for size in sizes]
    result = fitted([TimedLaunch(size, s * n) for size, s, n in zip(sizes, seconds, noise, strict=True)])
    for part in ("launches", "blocks", "rows", "asked"):
        assert getattr(result.price_s, part) == pytest.approx(getattr(price, part), rel=0.1, abs=2e-6)
    assert result.error < 0.05
    assert "prices fitted to 900 launches" in str(result)


def test_launches_take_what_their_prices_say_in_sum_however_their_times_vary() -> None:
    random = np.random.default_rng(0)
    sizes = [LaunchSize(launches=1, rows=float(rows)) for rows in random.integers(1, 200, 1200)]
    seconds = [(1e-3 + 1e-4 * size.rows) * random.gamma(16, 1 / 16) for size in sizes]
    assert abs(fitted([TimedLaunch(*each) for each in zip(sizes, seconds, strict=True)]).bias) < 0.03


MOST = 8  # sequences at a time, which are enough for each kind of launch


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tuple(each for each in SETTINGS if each[0] <= MOST)
    monkeypatch.setattr("isobatch.cluster.profiling.launch_prices.SETTINGS", settings)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", [partial(decoder, max_position_embeddings=2**20), t5])
def test_the_real_engine_is_timed(kind: object) -> None:
    ticks = count()
    result = measured(kind(), WORKLOAD, 0.0, stopwatch=lambda: next(ticks) * 1e-3, least=40)  # type: ignore[operator]
    assert result.launches >= 30
    assert 1 <= result.sequences <= MOST
    assert result.error == pytest.approx(0.0, abs=0.05)  # by this clock all launches take as long
    assert result.price_s.launches > 0
    assert result.projects, "each setting is timed, however short the time is"


@pytest.mark.usefixtures("few")
def test_the_time_ends_by_another_clock_than_launches_are_timed_by() -> None:
    clock, stopwatch = count(), count()
    result = measured(decoder(), WORKLOAD, 3.0, lambda: next(clock), lambda: next(stopwatch) * 1e-3, least=40)
    assert 30 <= result.launches < 300


@pytest.mark.usefixtures("few")
def test_no_more_texts_are_timed_at_once_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(model: Any, rules: DecoderRules, texts: Sequence[TextRequest], residents: int, exits: str) -> Engine:
        if residents > most:
            raise RuntimeError("can't allocate memory")
        return engine_for(model, rules, texts, residents, exits)

    monkeypatch.setattr("isobatch.cluster.profiling.launch_prices.engine_for", made)
    ticks, most = count(), 1
    result = measured(decoder(), WORKLOAD, 0.0, stopwatch=lambda: next(ticks) * 1e-3, least=40)
    assert result.sequences == 1
    most = 0
    with pytest.raises(RuntimeError, match="memory"):
        measured(decoder(), WORKLOAD, 0.0)


def test_the_front_is_timed_while_it_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = decoder()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, [f"word{number}" for number in range(model.config.vocab_size - 5)])  # and five of its own
    with caplog.at_level(logging.WARNING):
        assert 0 < front_s_per_token(tmp_path, anatomy_of(model).shape) < 0.01
    assert not caplog.records, "no request has failed"


def test_what_is_estimated_says_so_and_weighs_what_the_network_does() -> None:
    llama = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    table = estimated_table(llama, "h100")
    assert estimated_table(llama, "h100", "bfloat16") == replace(
        table, dtype="bfloat16", source=table.source.replace("float16", "bfloat16")
    )
    assert table.estimated
    assert table.weights_bytes == pytest.approx(2 * 8.03e9, rel=0.01)
    assert table.kv_bytes == 2 * 2 * 1024
    whole = table.seconds(LaunchSize(launches=1, blocks=32, bands=32, heads=1, rows=32, asked=1))
    assert whole == pytest.approx(15.0e9 / (0.8 * 3.35e12), rel=0.4)  # one token: weights are read, kernels started
    assert estimated_table(T5Config(feed_forward_proj="gated-gelu"), "v100").price_s.source_rows > 0


def test_weights_that_are_shared_count_once() -> None:
    apart, tied = (anatomy_of(decoder(seed=7, tied=tied)) for tied in (False, True))
    assert apart.network_bytes - tied.network_bytes == tied.weights.nbytes
