"""What is expected of ways to decode, beside other arithmetic and beside all of the small space."""

from dataclasses import replace

import pytest

from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.pages import pages_for
from isobatch.deployments.prepare.decoder import cheapest_schedule
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.text_plans import (
    NEARLY_BEST,
    RHYTHMS,
    DecodingFacts,
    DecodingGoal,
    DecodingWay,
    expected_pace,
    expected_paces,
    misfit,
    most_promising,
    plan_of,
    ways,
)
from isobatch.profiles.devices import Device
from isobatch.profiles.errors import UserError
from isobatch.profiles.text_profile import LaunchSize
from tests.helpers.paper_application import CPU, paper_decoder

WIDE = DecodingGoal(ttft_s=1e3, tpot_s=1e3)


@pytest.mark.parametrize(("cut", "survival"), [(2, 0.3), (4, 0.5), (1, 0.1), (6, 0.8)])
@pytest.mark.parametrize("k", RHYTHMS[:4])
def test_where_weights_bind_it_is_the_arithmetic_of_schedules(cut: int, survival: float, k: int) -> None:
    facts = DecodingFacts(paper_decoder(LaunchSize(blocks=1e-3), ((cut - 1, survival),)), CPU)
    full = expected_pace(facts, DecodingWay(8, 1, 32, 256)).tokens_per_s
    result = expected_pace(facts, DecodingWay(cut, k, 32, 256)).tokens_per_s / full
    best = cheapest_schedule(cut / 8, survival)
    assert result <= 1 / best.cost + 1e-6
    if k == best.launches:
        assert result == pytest.approx(1 / best.cost, rel=1e-6)


def test_a_share_that_rounds_to_nothing_is_planned_as_none() -> None:
    none, tiny = (DecodingFacts(paper_decoder(LaunchSize(blocks=1e-3), ((3, share),)), CPU) for share in (0.0, 1e-300))
    way = DecodingWay(4, 2, 32, 256)
    assert expected_pace(tiny, way) == expected_pace(none, way)


def test_where_rows_bind_recompute_gains_nothing_and_where_kv_binds_all() -> None:
    for price, gain in ((LaunchSize(rows=1e-3), 1.0), (LaunchSize(read=1e-3), 1 / (0.25 + 0.75 * 0.3))):
        facts = DecodingFacts(paper_decoder(price, prompt=200, output=2000), CPU)
        cut, full = (expected_pace(facts, DecodingWay(at, 1, 32, 256)).tokens_per_s for at in (2, 8))
        assert cut / full == pytest.approx(gain, rel=0.02)


def test_where_rows_bind_projection_gains_what_rows_that_do_not_run_would_cost() -> None:
    """Three of ten tokens run deep; of the others only KV is made, at a tenth of a row's price, or for nothing."""
    for projected, gain in ((0.0, 1 / (0.25 + 0.75 * 0.3)), (1e-4, 1 / (0.25 + 0.75 * (0.3 + 0.7 * 0.1)))):
        prices = LaunchSize(rows=1e-3, projected=projected)
        facts = DecodingFacts(paper_decoder(prices, prompt=1, output=2000), CPU)
        cut, full = (expected_pace(facts, DecodingWay(at, 1, 32, 256), at < 8).tokens_per_s for at in (2, 8))
        assert cut / full == pytest.approx(gain, rel=0.01)


def test_projection_is_planned_where_it_is_known() -> None:
    profile = paper_decoder(survival=((1, 0.3), (3, 0.2)))
    goal = DecodingGoal(exits="project")
    with pytest.raises(UserError, match="the share of tokens that continue is not known"):
        profile.for_exits("project")
    known = replace(profile, workload=replace(profile.workload, projected=((3, 0.1),))).for_exits("project")
    assert known.for_exits("recompute") == known
    facts = DecodingFacts(known, CPU)
    assert {way.cut for way in ways(facts, goal)} == {4, 8}, "what is lost is known with this cut alone"
    assert "the time of projection on cpu is not known" in str(misfit(facts, goal))
    priced = replace(known, tables=(replace(known.tables[0], projects=True),))
    assert misfit(DecodingFacts(priced, CPU), goal) is None


def test_the_best_of_all_ways_within_the_limits_comes_first() -> None:
    facts, goal = DecodingFacts(paper_decoder(survival=((1, 0.3), (3, 0.2), (5, 0.1))), CPU), DecodingGoal(1.0, 0.02)
    looked_at = expected_paces(facts, goal)
    within = [each for each in looked_at if each.tpot_s <= 0.02 and each.ttft_s <= 1]
    result = most_promising(looked_at, goal, 5)
    best = max(within, key=lambda each: each.tokens_per_s)
    assert result[0].tokens_per_s >= NEARLY_BEST * best.tokens_per_s
    assert result[0].way.residents <= best.way.residents
    assert len({(each.way.cut, each.way.launches) for each in result}) == 5
    assert not most_promising(looked_at, DecodingGoal(1.0, 1e-6), 5)


def test_texts_end_with_tokens_that_the_deep_part_never_sees() -> None:
    """A long text has nearly all seen; of a short one, what is left out is what arithmetic said too much before."""
    gains = []
    for output in (2000, 8):
        facts = DecodingFacts(paper_decoder(LaunchSize(rows=1e-3), survival=((1, 0.3),), prompt=1, output=output), CPU)
        cut, full = (expected_pace(facts, DecodingWay(at, 1, 32, 256)).tokens_per_s for at in (2, 8))
        gains.append(cut / full)
    unseen = (0.7 - 0.7**11) / 0.3 / 10  # tokens of a text's mean of 10, after the last that goes deep
    assert gains[0] == pytest.approx(1.0, abs=0.01)
    assert gains[1] == pytest.approx(1.1 / (1.1 - 0.75 * unseen), rel=0.01)


def test_no_more_are_resident_than_memory_holds() -> None:
    profile = paper_decoder()
    facts = DecodingFacts(profile, CPU)
    goal = DecodingGoal(kv_megabytes=4)
    held = 4 * 2**20 / (8 * 1024 * (profile.workload.prompt + profile.workload.output))
    assert max(way.residents for way in ways(facts, goal)) <= held
    for way in (DecodingWay(2, 3, 1, 64), DecodingWay(2, 3, 8, 64)):
        terms = plan_of(way, facts, goal, 1).decoding
        assert terms.kv_megabytes <= 4
        assert terms.max_context is None


def test_no_more_are_resident_than_were_timed() -> None:
    profile = paper_decoder()
    timed = replace(profile, tables=(replace(profile.tables[0], residents=10),))
    assert max(way.residents for way in ways(DecodingFacts(timed, CPU), DecodingGoal())) == 8


@pytest.mark.parametrize("has_encoder", [False, True])
@pytest.mark.parametrize("megabytes", [2, 5, 7])
def test_a_context_that_is_cut_has_room_in_whole_pages(megabytes: int, has_encoder: bool) -> None:
    profile = paper_decoder(reads=100_000, has_encoder=has_encoder)
    table = replace(profile.tables[0], kv_bytes=1000)
    plan = plan_of(
        DecodingWay(8, 1, 1, 64),
        DecodingFacts(replace(profile, tables=(table,)), CPU),
        DecodingGoal(kv_megabytes=megabytes),
        1,
    )
    config = DecoderConfig(model="").with_plan(plan)
    needed = pages_for(config.max_context, config.page_tokens) * (1 + has_encoder)
    assert needed <= config.pages(8 * table.kv_bytes)


def test_what_has_no_room_is_said() -> None:
    profile = paper_decoder()
    assert "the weights need 0.001 GB" in str(misfit(DecodingFacts(profile, Device("cpu", 1, 10**6, 1.0)), WIDE))
    assert "the longest text needs 1 MB" in str(misfit(DecodingFacts(profile, Device("cpu", 1, 1_300_000, 1.0)), WIDE))
    assert misfit(DecodingFacts(profile, CPU), WIDE) is None
    for reads, too_long in ((16, 2), (60, 1)):  # the texts have 64 and 56 tokens
        sentence = str(misfit(DecodingFacts(paper_decoder(reads=reads), CPU), WIDE))
        assert sentence == f"{too_long} of 2 texts have more than the {reads} tokens that the network reads"
    half = replace(WIDE, share_in_time=0.5)
    assert misfit(DecodingFacts(paper_decoder(reads=60), CPU), half) is None
    read_long = paper_decoder(prompt=90, output=2, has_encoder=True)
    assert "the longest text needs 3 MB" in str(misfit(DecodingFacts(read_long, CPU), DecodingGoal(kv_megabytes=2)))


def test_texts_that_are_refused_as_too_long_need_no_room_and_no_time() -> None:
    half, device = replace(WIDE, share_in_time=0.5), Device("cpu", 1, 1_950_000, 1.0)  # room for 92 positions
    assert "the longest text needs 1 MB" in str(misfit(DecodingFacts(paper_decoder(), device), half))
    assert misfit(DecodingFacts(paper_decoder(reads=60), device), half) is None
    one = paper_decoder(LaunchSize(rows=1e-3), prompt=100, reads=200)
    refused = replace(one, workload=replace(one.workload, prompts=(100, 9_000)))
    way = DecodingWay(8, 1, 1, 64)
    both = replace(refused, reads=10_000)
    waits_s = [expected_pace(DecodingFacts(each, CPU), way).ttft_s for each in (both, refused)]
    assert waits_s[1] < waits_s[0] / 50


def test_a_plan_is_read_as_it_was_written() -> None:
    facts = DecodingFacts(paper_decoder(), CPU)
    plan = plan_of(DecodingWay(2, 3, 32, 64), facts, DecodingGoal(), 2)
    assert [(split.start, split.stop, split.batch_size) for split in plan.splits] == [(0, 2, 32), (2, 8, 21)]
    assert Plan.from_json(plan.to_json()) == plan
