"""The memory of an engine, as much as its texts need or the texts as long as it holds, and where its network is cut."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from isobatch.deployments.decoding.anatomy import DecoderShape, anatomy_of
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine import VirtualClock, virtual_engine
from isobatch.deployments.decoding.engine_setup import (
    context_of,
    engine_for,
    engine_of,
    load_decoder,
    splits_and_limits,
)
from isobatch.deployments.decoding.ramp_rules import DecoderRamp, DecoderRules
from isobatch.deployments.decoding.replica import check_memory
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.deployments.demo import llm_demo_directory
from isobatch.profiles.errors import UserError
from tests.helpers.paper_application import paper_decoder
from tests.helpers.tiny_decoders import decoder, t5

EARLY = "verified", "project"
READS = 2**20  # tokens: their KV is larger than the memory of the default
WIDE = partial(decoder, max_position_embeddings=READS)
POSITION_BYTES = 2 * 4 * 12 * 8


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path, name: str) -> None:
    """transformers would draw them at random, for each replica others."""
    own = Path(copytree(llm_demo_directory(), tmp_path / "own"))
    weights = load_file(own / "model.safetensors")
    del weights[name]
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"its weights lack {name}"):
        load_decoder(own)


@pytest.mark.parametrize(("kind", "source"), [(WIDE, ()), (t5, (1,) * 4000)])
def test_the_longest_texts_fit_into_the_memory_at_once(kind: Callable[[], Any], source: tuple[int, ...]) -> None:
    texts = [TextRequest((1,) * length, 2000, source=source) for length in (1, 2, 3, 6000, 4000)]
    scheduler = engine_for(kind(), DecoderRules(), texts, residents=2).scheduler
    needed = (8000 + 6000 + 2 * len(source)) // scheduler.limits.page_tokens
    assert needed <= scheduler.pool.count < 1.2 * needed
    for text in texts[::-1]:
        scheduler.add(text, 0.0)
    scheduler.next(0.0)
    assert len(scheduler.residents) == 2


def test_without_a_limit_texts_may_be_as_long_as_the_memory_holds() -> None:
    config, shape = DecoderConfig(model=""), anatomy_of(WIDE()).shape
    context = context_of(shape, config, 8)
    pool = engine_of(WIDE(), DecoderRules(), config).scheduler.pool
    assert context == pool.count * config.page_tokens == 2**28 // POSITION_BYTES // 16 * 16
    assert context_of(shape, config, 4) == 2**28 // (POSITION_BYTES // 2) // 16 * 16
    assert context_of(anatomy_of(t5()).shape, config, 8) == 64
    with pytest.raises(UserError, match=r"kv_megabytes = 256: one text of 1048576 tokens needs 768; give more, or"):
        engine_of(WIDE(), DecoderRules(), DecoderConfig(model="", max_context=READS))


@pytest.mark.parametrize(("start", "page_tokens", "least"), [(None, 16, 4), (0, 16, 8), (None, 1, 1)])
def test_a_memory_that_holds_no_text_is_refused_with_the_least_that_does(
    start: int | None, page_tokens: int, least: int
) -> None:
    """A page of 16 positions has 4 MB here."""
    shape = DecoderShape(num_blocks=32, vocabulary=9, heads=8, width=128, reads=99, start=start)
    config = DecoderConfig(model="", kv_megabytes=least, page_tokens=page_tokens)
    check_memory(shape, config, 4)
    if least > 1:
        with pytest.raises(UserError, match=f"kv_megabytes = {least - 1}: the shortest text needs {least}"):
            check_memory(shape, config.model_copy(update={"kv_megabytes": least - 1}), 4)


@pytest.mark.parametrize(("cuts", "ends"), [((4, 2), (2, 4, 8)), ((2, 2), (2, 8)), ((), (8,)), (None, (6, 8))])
def test_each_block_runs_once_in_whatever_order_cuts_are_given(
    cuts: tuple[int, ...] | None, ends: tuple[int, ...]
) -> None:
    known = tuple(DecoderRamp(block=block, threshold=0.5) for block in (1, 3, 5))
    config = DecoderConfig(model="", cuts=cuts)
    splits, _ = splits_and_limits(config, DecoderRules(ramps=known[2:], others=known[:2]), 8)
    assert splits.ends == ends
    verified, project = (config.model_copy(update={"exits": each}).splits(ends[:-1], 8) for each in EARLY)
    assert (verified.verified, project.project) == (len(ends) > 1,) * 2, "without a cut, all prefixes are shared"
    engine = virtual_engine(paper_decoder(survival=((5, 0.5),)), "cpu", config, Random(0), VirtualClock())
    assert engine.scheduler.splits.ends == ends
