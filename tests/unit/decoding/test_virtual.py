"""Launches on paper: what they are made of, and who leaves."""

from dataclasses import replace
from random import Random

import pytest

from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine import OTHER_TOKEN, TOKEN, VirtualClock, virtual_engine
from isobatch.deployments.decoding.sequences import TextRequest
from isobatch.profiles.text_profile import LaunchSize
from tests.helpers.paper_application import paper_decoder

PATIENT = {"model": "", "max_waiting": 10**6, "ttft_ms": 1e12, "tpot_ms": 1e12}
LENGTHS = ((5, 9), (40, 3), (1, 30), (300, 2))
TEXTS = [TextRequest((number, *(TOKEN,) * (prompt - 1)), output) for number, (prompt, output) in enumerate(LENGTHS)]


def seconds(price_s: LaunchSize, texts: list[TextRequest], **told: object) -> float:
    """How long a replica is at these texts."""
    clock = VirtualClock()
    profile = paper_decoder(price_s, has_encoder=bool(texts[0].source))
    config = DecoderConfig.model_validate(PATIENT | {"prompt_rows": 16} | told)
    virtual_engine(profile, "cpu", config, Random(0), clock).write_all(texts)
    return clock.now_s


@pytest.mark.parametrize("residents", [1, 3])
def test_every_position_but_the_last_passes_each_block_once(residents: int) -> None:
    positions = sum(len(text.prompt) + text.max_tokens - 1 for text in TEXTS)
    assert seconds(LaunchSize(rows=1.0), TEXTS, exits="off", max_residents=residents) == positions * 8


def test_the_head_is_asked_once_for_each_token_where_nobody_leaves() -> None:
    assert seconds(LaunchSize(asked=1.0), TEXTS, exits="off") == sum(text.max_tokens for text in TEXTS)


def test_a_lone_text_reads_what_it_has_seen() -> None:
    (text,) = lone = [TextRequest((TOKEN,) * 5, 4)]
    assert seconds(LaunchSize(read=1.0), lone, exits="off") == 8 * (5 + 6 + 7 + 8)
    assert seconds(LaunchSize(seen=1.0), lone, exits="off") == 8 * (5 * 5 + 6 + 7 + 8)
    assert seconds(LaunchSize(launches=1.0, blocks=0.01), lone, exits="off") == pytest.approx(text.max_tokens * 1.08)


def test_an_encoder_reads_each_source_once() -> None:
    texts = [TextRequest((TOKEN,), 5, source=(TOKEN,) * 7), TextRequest((TOKEN,), 3, source=(TOKEN,) * 9)]
    assert seconds(LaunchSize(source_rows=1.0), texts, max_residents=1) == 16
    assert seconds(LaunchSize(sources=1.0), texts) == 1


def test_projected_rows_are_all_that_leave_and_do_not_end_a_text() -> None:
    """One text, cut in the middle, of which half leaves: its prompt and those that go on run deep."""
    profile = paper_decoder(LaunchSize(projected=1.0), survival=((3, 0.5),))
    config = DecoderConfig.model_validate(PATIENT | {"exits": "project"})
    result = {}
    for part in ("rows", "projected", "projections"):
        clock = VirtualClock()
        priced = replace(profile, tables=(replace(profile.tables[0], price_s=LaunchSize(**{part: 1.0})),))
        engine = virtual_engine(priced, "cpu", config, Random(0), clock)
        ((_, depths),) = engine.write_with_depths([TextRequest((TOKEN,) * 5, 40)])
        result[part] = clock.now_s
    deep = [place for place, depth in enumerate(depths) if depth == 7]  # a token is known at the position before it
    assert result["rows"] == 4 * (5 + 39) + 4 * (5 - (0 not in deep) + sum(place > 0 for place in deep))
    assert result["projected"] == 4 * sum(depth == 3 for depth in depths[: deep[-1]])
    assert 4 <= result["projections"] <= 4 * len(deep)


def test_texts_that_come_while_one_is_written_are_written_beside_it() -> None:
    """A launch takes 30 ms, however many are in it: no token of anybody comes later than promised."""
    clock, luck, most, left = VirtualClock(), Random(0), 0, 60
    config = DecoderConfig.model_validate(PATIENT | {"exits": "off", "tpot_ms": 50})
    engine = virtual_engine(paper_decoder(LaunchSize(launches=0.03, rows=1e-6)), "cpu", config, luck, clock)
    next_s = 0.0
    while left or engine.scheduler.residents:
        while left and next_s <= clock.now_s:
            engine.open(TextRequest((TOKEN,) * 5, 20))
            left, next_s = left - 1, next_s + luck.expovariate(5.0)
        if engine.step() is None:
            clock.now_s = next_s
        most = max(most, len(engine.scheduler.residents))
        assert len(engine.scheduler.waiting) < 3
    assert most > 2


def test_as_many_tokens_leave_as_the_profile_says() -> None:
    config = DecoderConfig.model_validate(PATIENT)
    profile = paper_decoder(survival=((1, 0.5), (4, 0.2)))
    engine = virtual_engine(profile, "cpu", config, Random(0), VirtualClock())
    depths: list[int] = []
    for _ in range(100):
        engine.open(TextRequest((TOKEN,), 40))
    while (news := engine.step()) is not None:
        depths += [depth for one in news for depth in one.depths]
    assert len(depths) == 4000
    for depth, share in ((1, 0.5), (4, 0.3), (7, 0.2)):
        assert depths.count(depth) / 4000 == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)


def test_drafts_are_put_right_where_the_full_network_does_not_agree() -> None:
    config = DecoderConfig.model_validate(PATIENT | {"exits": "verified"})
    profile = paper_decoder()
    agreed = virtual_engine(profile, "cpu", config, Random(0), VirtualClock())
    assert set(agreed.write_all([TextRequest((TOKEN,), 50)])[0]) == {TOKEN}
    object.__setattr__(profile.workload, "agreement", 0.5)
    doubted = virtual_engine(profile, "cpu", config, Random(0), VirtualClock())
    (written,) = doubted.write_all([TextRequest((TOKEN,), 50)])
    assert len(written) == 50
    assert set(written) == {TOKEN, OTHER_TOKEN}


def test_serve_can_count_as_many_requests_as_a_decoder_may_hold() -> None:
    assert DecoderConfig(model="", replicas=1000, max_waiting=2**20).max_requests < 2**31
    with pytest.raises(ValueError, match="less than or equal to 1048576"):
        DecoderConfig(model="", max_waiting=2**20 + 1)
