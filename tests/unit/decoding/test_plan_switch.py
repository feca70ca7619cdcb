"""Leading a decoder from plan to plan, and its replicas on several kinds of devices, without Ray."""

import asyncio
import json
import pickle
import re
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isobatch.deployments import ray_facts
from isobatch.deployments.decoding import replica, replica_group
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.engine_setup import language_of
from isobatch.deployments.decoding.loop import HANGS_S, TokenAddress, TokenInbox, TokenOutlets
from isobatch.deployments.decoding.ramp_rules import DecoderRamp, DecoderRules, ProjectedTexts
from isobatch.deployments.decoding.replica import DecoderReplica, PlanSwitch
from isobatch.deployments.decoding.replica_group import FULL_FOR_S, MOST_ASKED, ReplicaGroup, written_by_any
from isobatch.deployments.decoding.scheduler import NewTokens, NoReplica, ReplicaFull
from isobatch.deployments.decoding.sequences import Finish, TextRequest
from isobatch.deployments.demo import llm_demo_directory
from isobatch.deployments.deployer.steps import Moved, Undone
from isobatch.deployments.ray_facts import StoredPlan
from isobatch.deployments.transport.wire import Wire
from isobatch.optimizer.plan import DecodingTerms, Placement, Plan, Split
from isobatch.optimizer.text_plans import terms_of
from isobatch.profiles.errors import UserError
from tests.helpers.asking import until
from tests.helpers.clock import Clock

KNOWN = ProjectedTexts(survival=0.1, same_tokens=1.0, same_texts=1.0, deep_share=0.5, gain=2.0)
RULES = DecoderRules(
    ramps=(DecoderRamp(block=1, threshold=0.5),), others=(DecoderRamp(block=3, threshold=0.5),), project=KNOWN
)


def pipeline(kind: str, cut: int, tokens_per_s: float, exits: str = "recompute", replicas: int = 1) -> Plan:
    splits = (Split(0, cut, 8, ramps=(cut - 1,)), Split(cut, 8, 4)) if cut < 8 else (Split(0, 8, 8),)
    terms = DecodingTerms(exits, 64, 8, 1.0, 0.1, tokens_per_s, max_context=40 if kind == "t4" else 64)
    return Plan((Placement(kind, replicas, splits, local=cut < 8),), decoding=terms)


WANTED = TextRequest((1,), 1)
BOTH = replace(pipeline("cpu", 2, 300.0), beside=(pipeline("t4", 8, 100.0, "off", replicas=2),))


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> PlanSwitch:
    monkeypatch.setattr(ray_facts, "application_name", lambda: "texts")
    monkeypatch.setattr(ray_facts, "stored_plan", lambda application: None)
    monkeypatch.setattr(StoredPlan, "store", lambda memory, application: None)
    config = DecoderConfig(model="").by_kind(BOTH)["cpu"]

    async def versions() -> Sequence[int]:
        return [1]

    return PlanSwitch(config, BOTH, "told", RULES, 8, versions)


def test_replicas_of_each_kind_have_a_configuration_of_their_own() -> None:
    result = DecoderConfig(model="", device="cuda").by_kind(BOTH)
    assert [(kind, each.cuts, each.exits, each.replicas) for kind, each in result.items()] == [
        ("cpu", (2,), "recompute", 1),
        ("t4", (), "off", 2),
    ]
    assert {each.max_context for each in result.values()} == {40}, "the longest text may be sent to any of them"
    assert result["cpu"].replica_options("cpu") == {"num_cpus": 1.0, "num_gpus": 0}
    assert result["t4"].replica_options("t4") == {"num_cpus": 1, "num_gpus": 1, "accelerator_type": "T4"}
    assert result["t4"].replica_options("t4", labelled=True)["label_selector"] == {"isobatch.io/kind": "t4"}
    assert result["t4"].replica_options() == {"num_cpus": 1, "num_gpus": 1}


def test_a_plan_without_a_file_is_for_whatever_there_is(tmp_path: Path) -> None:
    config = DecoderConfig(model="", max_residents=3)
    assert config.per_kind() == {"": config}
    (tmp_path / "plan.json").write_text(BOTH.to_json())
    settings = DecoderConfig(model="", plan=str(tmp_path / "plan.json"))
    assert list(settings.per_kind()) == ["cpu", "t4"]
    with pytest.raises(UserError, match="two pipelines are on one kind of device"):
        settings.by_kind(replace(BOTH, beside=(pipeline("cpu", 4, 1.0),)))


@pytest.mark.parametrize(
    ("terms", "fields", "why"),
    [
        ({"exits": "early"}, {}, "exits = 'early': Input should be 'recompute', 'project', 'verified' or 'off'"),
        ({"prompt_rows": 0}, {}, "prompt_rows = 0: Input should be greater than or equal to 1"),
        ({"kv_megabytes": -1}, {}, "kv_megabytes = -1: Input should be greater"),
        ({"ttft_s": 0.0}, {}, "ttft_ms = 0.0: Input should be greater than 0"),
        ({"tpot_s": -1.0}, {}, "tpot_ms = -1000.0: Input should be greater than 0"),
        ({"max_context": 1}, {}, "max_context = 1: Input should be greater"),
        ({}, {"thresholds": ((1, 2.0),)}, "it has thresholds: those of a decoder's ramps are in its exits.json"),
        ({}, {"splits": (Split(0, 2, 8), Split(2, 8, 4))}, "ramps = [], cuts = [2]: a decoder is cut behind each"),
        ({}, {"splits": (Split(0, 2, 8, (0, 1)), Split(2, 8, 4))}, "ramps = [0, 1], cuts = [2]: a decoder is cut"),
        ({}, {"splits": (Split(0, 2, 4, (1,)), Split(2, 8, 8))}, "deep_share = 2.0: Input should be less"),
    ],
)
def test_a_plans_values_are_checked_as_the_fields_that_they_set(
    tmp_path: Path, terms: dict[str, Any], fields: dict[str, Any], why: str
) -> None:
    right = pipeline("cpu", 2, 300.0)
    placement = replace(right.placements[0], splits=fields.get("splits", right.splits))
    plan = replace(right, placements=(placement,), decoding=replace(terms_of(right), **terms))
    plan = replace(plan, thresholds=fields.get("thresholds", ()))
    (path := tmp_path / "plan.json").write_text(plan.to_json())
    with pytest.raises(UserError, match=re.escape(f"plan = '{path}': {why}")):
        DecoderConfig(model="", plan=str(path)).per_kind()
    with pytest.raises(UserError, match=re.escape(f"the plan: {why}")):
        DecoderConfig(model="").switched_to(plan)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"tokens_per_s": -1.0}])
def test_a_plan_promises_no_less_than_nothing_on_one_thread(wrong: dict[str, float]) -> None:
    content = json.loads(pipeline("cpu", 2, 300.0).to_json())
    content["decoding"] |= wrong
    with pytest.raises(UserError, match="must be at least 0, and at least 1"):
        Plan.from_json(json.dumps(content))


async def test_texts_are_shared_as_the_plan_that_runs_says(lead: PlanSwitch) -> None:
    assert (lead.ramps, lead.shares) == ([1], {"cpu": 300.0, "t4": 100.0})
    other = replace(pipeline("cpu", 4, 100.0), beside=(pipeline("t4", 2, 200.0, replicas=2),))
    assert isinstance(await lead.apply(other), Moved)
    assert (lead.plan(), lead.ramps, lead.shares) == (other, [1, 3], {"cpu": 100.0, "t4": 200.0})
    uncut = pipeline("t4", 8, 100.0, "project", replicas=2)
    assert isinstance(await lead.apply(replace(pipeline("cpu", 2, 1.0, "project"), beside=(uncut,))), Moved)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (pipeline("cpu", 2, 300.0), "a running decoder has {'cpu': 1, 't4': 2}, and this plan is for {'cpu': 1}"),
        (replace(BOTH, beside=(pipeline("t4", 3, 1.0, replicas=2),)), "no ramp is known before block 3"),
        (replace(BOTH, beside=(pipeline("t4", 4, 1.0, "project", replicas=2),)), "its loss was measured with the cuts"),
    ],
)
async def test_what_cannot_be_followed_is_one_sentence(lead: PlanSwitch, plan: Plan, why: str) -> None:
    undone = await lead.apply(plan)
    assert isinstance(undone, Undone)
    assert why in undone.reason
    assert lead.plan() == BOTH


async def test_a_plan_that_cannot_be_stored_is_not_the_one_that_runs(
    lead: PlanSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(memory: StoredPlan, application: str) -> None:
        raise ConnectionError("Ray's store is away")

    monkeypatch.setattr(StoredPlan, "store", fail)
    with pytest.raises(ConnectionError):
        await lead.apply(replace(pipeline("cpu", 4, 100.0), beside=(pipeline("t4", 2, 200.0, replicas=2),)))
    assert (lead.plan(), lead.shares) == (BOTH, {"cpu": 300.0, "t4": 100.0})


async def test_replicas_follow_the_plan_after_one_whose_storing_seemed_to_fail(
    lead: PlanSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They tell plans apart by their versions."""
    versions = list[int]()

    def store(memory: StoredPlan, application: str) -> None:
        versions.append(memory.version)
        if len(versions) == 1:
            raise ConnectionError("no reply")

    monkeypatch.setattr(StoredPlan, "store", store)
    monkeypatch.setattr(replica, "FOLLOW_WITHIN_S", 0.0)
    with pytest.raises(ConnectionError):
        await lead.apply(BOTH)
    assert isinstance(await lead.apply(BOTH), Moved)
    assert len(set(versions)) == 2


async def test_a_plan_is_followed_even_if_its_caller_goes(lead: PlanSwitch, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def store(memory: StoredPlan, application: str) -> None:
        begun.set()
        may_end.wait(5.0)

    monkeypatch.setattr(StoredPlan, "store", store)
    other = replace(pipeline("cpu", 4, 100.0), beside=(pipeline("t4", 2, 200.0, replicas=2),))
    applying = asyncio.create_task(lead.apply(other))
    await asyncio.to_thread(begun.wait, 5.0)
    applying.cancel()
    may_end.set()
    async with asyncio.timeout(5.0):
        while lead.plan() != other:
            await asyncio.sleep(0.01)


INBOX = TokenInbox()
FULL = ReplicaFull(2.0)
END = NewTokens(0, (6,), (0,), Finish.STOP)


class Replicas:
    """Stands for Serve's handle to replicas of one kind: they say these, in turn."""

    def __init__(self, *turns: ReplicaFull | list[NewTokens]) -> None:
        self.asked, self.write, self._turns = 0, self, cycle(turns)

    async def remote(self, request: TextRequest, address: TokenAddress, number: int, *_: str) -> ReplicaFull | None:
        self.asked += 1
        turn = next(self._turns)
        if isinstance(turn, ReplicaFull):
            return turn
        for each in turn:
            INBOX.streams[number].put(each)
        return None


async def answer(pieces: AsyncGenerator[NewTokens, None]) -> list[NewTokens] | ReplicaFull:
    """What is written, or the refusal."""
    try:
        return [each async for each in pieces]
    except ReplicaFull as full:
        return full


async def test_replicas_that_have_just_been_full_are_not_asked_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, clock = Replicas(FULL), Clock(1.0)
    group = ReplicaGroup("cpu", replicas, INBOX)
    monkeypatch.setattr(replica_group, "time", SimpleNamespace(monotonic=clock, time=clock))
    for _ in range(3):
        assert await answer(group.write(WANTED, "")) == FULL
    assert (replicas.asked, group.writing) == (1, 0)
    clock.now_s += FULL_FOR_S
    assert await answer(group.write(WANTED, "")) == FULL
    assert replicas.asked == 2
    assert await answer(group.write(replace(WANTED, replayed=(0,)), "")) == FULL
    assert replicas.asked == 3, "a text that goes on is asked for at once: replicas do not refuse it"


async def test_where_one_kind_has_no_place_another_writes() -> None:
    kinds = Replicas(FULL), Replicas([NewTokens(0, (5,), (0,)), END]), Replicas([END])
    groups = [ReplicaGroup("", each, INBOX) for each in kinds]
    (written,) = [each async for each in written_by_any(groups, WANTED, "")]
    assert (written.tokens, written.finish) == ((5, 6), Finish.STOP)
    assert [each.asked for each in kinds] == [1, 1, 0]


async def test_where_one_replica_is_full_another_of_its_kind_writes() -> None:
    replicas, full = Replicas(FULL, [END]), Replicas(FULL)
    group = ReplicaGroup("", replicas, INBOX, count=2)
    for _ in range(3):
        assert isinstance(await answer(written_by_any([group], WANTED, "")), list)
        assert await answer(written_by_any([ReplicaGroup("", full, INBOX, count=9)], WANTED, "")) == FULL
    assert (replicas.asked, full.asked) == (6, 3 * MOST_ASKED)


async def test_the_age_of_a_text_counts_once_a_replica_has_shown_its_clock() -> None:
    """Its clock may be an hour ahead, and it would refuse a text that seems an hour old."""
    requests = list[TextRequest]()

    class Noting(Replicas):
        async def remote(self, request: TextRequest, *about: Any) -> ReplicaFull | None:
            requests.append(request)
            return await super().remote(request, *about)

    group, request = ReplicaGroup("", Noting([END]), INBOX), replace(WANTED, requested_s=1e9)
    assert isinstance(await answer(group.write(request, "")), list)
    INBOX.least_s["a replica"] = -3600.0
    try:
        assert isinstance(await answer(group.write(request, "")), list)
    finally:
        INBOX.least_s.clear()
    assert [each.requested_s for each in requests] == [0.0, 1e9 + 3600.0]
    assert requests[0].age_s(1e9 + 3600.5) == 0.0
    assert requests[1].age_s(1e9 + 3600.5) == 0.5


class Absent:
    """Stands for Serve's handle to replicas none of which is alive."""

    write = property(lambda self: self)

    def remote(self, *_: object) -> asyncio.Future[object]:
        return asyncio.ensure_future(asyncio.Event().wait())


async def test_where_no_replica_is_alive_another_kind_writes_or_the_client_hears_of_it() -> None:
    absent = ReplicaGroup("", Absent(), INBOX, 0.01, count=4)
    other = ReplicaGroup("", Replicas([NewTokens(0, (), ()), END]), INBOX)
    assert [each.tokens async for each in written_by_any([absent, other], WANTED, "")] == [(6,)]
    assert await answer(written_by_any([absent], WANTED, "")) == NoReplica(1.0)
    assert (absent.writing, INBOX.streams) == (0, {})


async def test_another_kind_whose_replicas_are_alive_is_asked_soon() -> None:
    """Otherwise the text would be late there when it is asked at last."""
    inbox = TokenInbox()
    await inbox.open(Wire("127.0.0.1"))
    outlet = await TokenOutlets(Wire("127.0.0.1"), "t4").to(inbox.address)
    await until(lambda: inbox.has_alive("t4"))

    class Writes(Absent):
        def remote(self, *told: object) -> asyncio.Future[object]:
            inbox.streams[cast(int, told[2])].put(END)
            return super().remote()

    absent, alive = ReplicaGroup("cpu", Absent(), inbox, 4.0), ReplicaGroup("t4", Writes(), inbox, 4.0)
    async with asyncio.timeout(2.5):
        assert isinstance(await answer(written_by_any([absent, alive], WANTED, "")), list)
    outlet.hang_up()
    inbox.close()


async def test_where_one_replica_hangs_and_another_does_not_that_one_writes() -> None:
    class EachSecondHangs(Absent):
        requests = 0

        def remote(self, *told: object) -> asyncio.Future[object]:
            self.requests += 1
            if self.requests % 2 == 0:
                inbox.streams[cast(int, told[2])].put(END)
            return super().remote()

    inbox = TokenInbox()
    await inbox.open(Wire("127.0.0.1"))
    outlet = await TokenOutlets(Wire("127.0.0.1"), "cpu").to(inbox.address)
    await until(lambda: inbox.has_alive("cpu"))
    group, other = (ReplicaGroup(kind, EachSecondHangs(), inbox, 1.0, count=2) for kind in ("cpu", "t4"))
    async with asyncio.timeout(2.5):
        for _ in range(3):
            assert isinstance(await answer(written_by_any([group], WANTED, "")), list)
    assert await answer(written_by_any([other], WANTED, "")) == NoReplica(1.0), "that is of another kind"
    outlet.hang_up()
    inbox.close()


def test_new_replicas_start_beside_the_old_ones_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end after fronts, which give texts up."""
    from isobatch.deployments.decoding import app

    def options(cpus: float) -> dict[str, dict[str, Any]]:
        noted = dict[str, dict[str, Any]]()

        def deployment(name: str, **options: Any) -> Any:
            noted[name] = options
            return lambda _: SimpleNamespace(bind=lambda *_: None)

        monkeypatch.setattr(app.serve, "deployment", deployment)
        monkeypatch.setattr(app, "free_resources", lambda: [{"CPU": cpus}])
        app.build(DecoderConfig(model="", dtype="float32", replicas=2, drain_s=50.0))
        return noted

    assert [options(cpus)["decoder"]["max_surge_percent"] for cpus in (2.0, 1.0)] == [100, 0]
    assert [options(2.0)[name]["graceful_shutdown_timeout_s"] for name in ("front", "decoder")] == [50.0, 100.0]
    assert options(2.0)["decoder"]["health_check_timeout_s"] == HANGS_S / 3


async def test_a_replica_of_a_network_with_other_tokens_refuses_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment of a deploy, a front may reach replicas of the network before or after."""

    async def nothing(_: DecoderReplica) -> None: ...

    monkeypatch.setattr(DecoderReplica, "_export_metrics", nothing)
    monkeypatch.setattr(replica, "wire_of", lambda _: Wire("127.0.0.1"))
    folder, inbox = llm_demo_directory(), TokenInbox()
    await inbox.open(Wire("127.0.0.1"))
    made = DecoderReplica(DecoderConfig(model=str(folder)), "told")
    handle = SimpleNamespace(write=SimpleNamespace(remote=made.write))
    same, other = (ReplicaGroup("", handle, inbox, language=each) for each in (language_of(folder), "others"))
    assert await answer(other.write(WANTED, "")) == NoReplica(1.0) == pickle.loads(pickle.dumps(NoReplica(1.0)))  # noqa: S301
    (written,) = cast(list[NewTokens], await answer(same.write(WANTED, "")))
    assert len(written.tokens) == 1
    await made.check_health()
    monkeypatch.setattr(TokenOutlets, "hangs", True)
    with pytest.raises(RuntimeError, match="decoding has ended, or hangs"):
        await made.check_health()
    made._loop.end()
    inbox.close()


async def test_where_no_kind_has_a_place_the_client_is_told_when_the_first_will() -> None:
    groups = [ReplicaGroup("", Replicas(ReplicaFull(wait_s)), INBOX) for wait_s in (3.0, 1.0, 2.0)]
    assert await answer(written_by_any(groups, WANTED, "")) == ReplicaFull(1.0)
