"""Pages that texts share: against a plain list of what was kept, and against texts that share nothing."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.deployments.decoding import paged_attention
from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.pages import PagePool, page_names
from isobatch.deployments.decoding.scheduler import DecodingLimits
from isobatch.deployments.decoding.sequences import Splits, TextRequest
from isobatch.deployments.transport.device_copies import to_device
from tests.helpers.tiny_decoders import BLOCKS, decoder, engine, plainly, t5, written_by

PAGE = 2  # tokens
COUNT = 5  # pages
texts = st.lists(st.integers(0, 1), min_size=PAGE, max_size=3 * PAGE)


@settings(deadline=None)
@given(st.lists(st.tuples(texts, st.integers(0, 3)), max_size=40))
def test_the_pool_keeps_what_a_plain_list_keeps(visits: list[tuple[list[int], int]]) -> None:
    """Each text takes what is kept of its beginning, fills other pages, stays for some visits, and gives all back."""
    pool = PagePool(COUNT)
    kept: list[tuple[int, ...]] = []  # beginnings, those first that go first
    inside: list[tuple[int, list[int], list[tuple[int, ...]]]] = []  # visits left, pages, beginnings in them
    for text, stays in visits:
        inside = [(left - 1, pages, beginnings) for left, pages, beginnings in inside]
        for left, pages, beginnings in [each for each in inside if each[0] < 0]:
            pool.give(pages)
            inside.remove((left, pages, beginnings))
            used = [beginning for _, _, others in inside for beginning in others]
            kept += [each for each in reversed(beginnings) if each not in used and each not in kept]
        own = [tuple(text[: end + PAGE]) for end in range(0, len(text) - PAGE + 1, PAGE)]
        used = [beginning for _, _, others in inside for beginning in others]
        known = 0
        while known < len(own) and own[known] in (*used, *kept):
            known += 1
        names = page_names(text, PAGE)
        shared = pool.share(names)
        assert len(shared) == known
        kept = [each for each in kept if each not in own[:known]]
        missing = len(own) - known
        fresh = pool.take(missing)
        empty = COUNT - len({page for _, pages, _ in inside for page in pages} | set(shared)) - len(kept)
        if missing > empty + len(kept):
            assert fresh is None
            pool.give(shared)
            kept += [each for each in reversed(own[:known]) if each not in used]
            continue
        assert fresh is not None
        kept = kept[max(0, missing - empty) :]
        for page, name in zip(shared + fresh, names, strict=True):
            pool.name(page, name)
        # A page whose beginning another page has already is its text's alone.
        inside.append((stays, shared + fresh, own))
    for _, pages, _ in inside:
        pool.give(pages)
    assert pool.free == COUNT


shared_starts = st.lists(st.integers(0, 22), min_size=1, max_size=14).map(tuple)
ends = st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=3).map(tuple), min_size=2, max_size=5)


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["off", "recompute", "verified", "project"]), shared_starts, ends, st.integers(0, 12),
    st.sampled_from([1, 3, 4]), st.integers(1, 3),
)  # fmt: skip
def test_texts_that_begin_alike_are_written_as_if_alone(
    exits: str, start: tuple[int, ...], ends: list[tuple[int, ...]], scarce: int, page_tokens: int, residents: int
) -> None:
    """One after the other or together, with other pages needed meanwhile, and with texts that go on."""
    model, ramps = decoder(), {} if exits == "off" else {0: 0.3, 2: 0.3}
    requests = [TextRequest(start + end, 5) for end in ends]
    limits = DecodingLimits(max_residents=residents, page_tokens=page_tokens, prompt_rows=8, ttft_s=1e9, tpot_s=1e9)
    pages = -(-27 // page_tokens) + scarce
    verified, project = exits == "verified", exits == "project"
    running = engine(model, ramps, verified, pages, limits=limits, project=project)
    used = {} if verified else ramps
    written = written_by(running, requests)
    plain = [plainly(model, each, used, project, claimed=written[place]) for place, each in enumerate(requests)]
    for again in (False, True):
        written = written_by(running, requests) if again else written
        assert [written[place][0] for place in range(len(requests))] == [tokens for tokens, _ in plain]
    longer = [
        replace(each, prompt=each.prompt + tuple(tokens), replayed=tuple(depths) if project else ())
        for each, (tokens, depths) in zip(requests, plain, strict=True)
    ]
    if not project:
        written = written_by(running, longer)
        expected = [plainly(model, each, used, claimed=written[place])[0] for place, each in enumerate(longer)]
        assert [written[place][0] for place in range(len(longer))] == expected
    assert running.scheduler.pool.free == pages


def check_pages(running: Engine, page_tokens: int) -> None:
    """No page is lost or free twice, and only full pages with the same beginning have several holders."""
    pool, held = running.scheduler.pool, dict[int, tuple[int, ...]]()
    for sequence in running.scheduler.residents.values():
        assert len(set(sequence.pages)) == len(sequence.pages)
        for end, page in enumerate(sequence.pages, 1):
            beginning = tuple(sequence.tokens[: end * page_tokens])
            assert held.setdefault(page, beginning) == beginning
    assert pool.free + len(held) == pool.count


ways = st.sampled_from(["off", "recompute", "verified", "project"])
visits = st.tuples(st.integers(0, 3), ends.map(lambda several: several[0]), st.none() | st.integers(0, 30))


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(ways, st.lists(visits, min_size=1, max_size=4)), min_size=2, max_size=4),
    shared_starts, st.integers(0, 12), st.sampled_from([1, 3, 4]), st.integers(1, 3),
)  # fmt: skip
def test_pages_are_exact_and_whole_while_exits_change_and_texts_are_cancelled(
    phases: list[tuple[str, list[tuple[int, tuple[int, ...], int | None]]]],
    start: tuple[int, ...], scarce: int, page_tokens: int, residents: int,
) -> None:  # fmt: skip
    """A prompt may be what was written under other exits. Some texts are cancelled after some launches."""
    model, ramps, texts = decoder(), {0: 0.6, 2: 0.6}, [start]  # two tokens of three leave
    limits = DecodingLimits(max_residents=residents, page_tokens=page_tokens, prompt_rows=8, ttft_s=1e9, tpot_s=1e9)
    pages = -(-60 // page_tokens) + scarce
    running = engine(model, ramps, pages=pages, limits=limits)
    for exits, prompts in phases:
        verified, project = exits == "verified", exits == "project"
        used = {} if exits == "off" else ramps
        running.recut(Splits((*(block + 1 for block in used), BLOCKS), verified, 4, project), limits)
        requests = [TextRequest((texts[-1 - place % len(texts)] + end)[:50], 8) for place, end, _ in prompts]
        names = [running.open(request) for request in requests]
        left = {name: launches for name, (_, _, launches) in zip(names, prompts, strict=True)}
        written = {name: (list[int](), list[int]()) for name in names}
        for launch in count():
            for name in [name for name in left if left[name] == launch]:
                running.cancel(name)
                del written[name]
                check_pages(running, page_tokens)
            if (news := running.step()) is None:
                break
            check_pages(running, page_tokens)
            for each in news:
                written[each.name][0].extend(each.tokens)
                written[each.name][1].extend(each.depths)
                if each.finish:
                    left.pop(each.name)
        for name, request in zip(names, requests, strict=True):
            if name in written:
                claimed, ramps_now = written[name], {} if verified else used
                assert claimed[0] == plainly(model, request, ramps_now, project, claimed=claimed)[0]
                texts.append(request.prompt + tuple(claimed[0]))
    assert running.scheduler.pool.free == pages


@pytest.mark.parametrize("exits", ["off", "recompute", "verified", "project"])
def test_a_prompt_is_read_once(exits: str) -> None:
    prompt, limits = tuple(range(20)), DecodingLimits(page_tokens=4, ttft_s=1e9, tpot_s=1e9)
    ramps = {} if exits == "off" else {1: 0.3}
    running = engine(decoder(), ramps, exits == "verified", limits=limits, project=exits == "project")
    for last in (1, 2):
        written_by(running, [TextRequest((*prompt, last), 6)])
    pool = running.scheduler.pool
    assert (pool.asked, pool.shared) == (42, 20)


@pytest.mark.parametrize(("last", "together"), [((1, 2, 3, 4), 4), ((1, 1, 1, 1), 4), ((), 2)])
def test_texts_whose_pages_are_shared_leave_room_for_others(last: tuple[int, ...], together: int) -> None:
    """Each needs five of 13 pages, of which four may share three; where nothing is alike, two have room and one more
    for what comes next."""
    limits = DecodingLimits(max_residents=8, page_tokens=4, ttft_s=1e9, tpot_s=1e9)
    running = engine(decoder(), {}, pages=13, limits=limits)
    requests = [TextRequest((*range(12), each), 6) for each in last] or [
        TextRequest((each,) * 13, 6) for each in range(4)
    ]
    running.open(requests[0])
    running.step()
    for each in requests[1:]:
        running.open(each)
    most = 0
    while running.step() is not None:
        most = max(most, len(running.scheduler.residents))
    assert (most, running.scheduler.preempted) == (together, 0)


def test_what_an_encoder_has_read_is_not_shared() -> None:
    running = engine(t5(), {}, limits=DecodingLimits(page_tokens=1, ttft_s=1e9, tpot_s=1e9))
    for source in ((1, 2), (3, 4)):
        request = TextRequest((0,), 4, source=source)
        assert written_by(running, [request])[0] == plainly(t5(), request, {})
    assert running.scheduler.pool.shared == 0


def test_a_launch_sends_pages_and_positions_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and masks, which are as long as what is read, are made on the device: a GPU waits for no long array."""
    sent: list[int] = []

    def noted(arrays: list[Any], device: torch.device) -> list[torch.Tensor]:
        sent.append(sum(array.size for array in arrays))
        return to_device(arrays, device)

    monkeypatch.setattr(paged_attention, "to_device", noted)
    running = engine(decoder(), {})
    name = running.open(TextRequest(tuple([3] * 80), 4))
    steps = 0
    while running.step() is not None:
        steps += 1
    assert isinstance(name, int)
    assert len(sent) == steps
    assert sent[-1] < 80, "a position, its places and 21 pages, but not the positions that are read"
