"""Cascades at the front: answers name their level."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from isobatch.deployments.config import AppConfig
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Limits
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.answers import Answer
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.service import Content, Service
from isobatch.deployments.front.stats import state_of, stats_of
from isobatch.deployments.models import load_served
from isobatch.deployments.replica.loading import load_front_model, load_model
from isobatch.deployments.replica.local_workers import LocalWorkers
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.replica.virtual import VirtualModel
from isobatch.deployments.transport.packed import pack
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.cascade_directories import cascade_directory

EDGE = 2
SLOW_S = 0.4  # what the second level takes
EASY, HARD = {"exit_block": 0}, {"exit_block": 3}


def model(second_s: float) -> VirtualModel:
    row = (1e-3, 1e-3, second_s / 2, second_s / 2)
    table = LatencyTable("v100", (1, 3), (row,) * 2, ((0.0,) * 4,) * 2, 0.0, (8,) * 4, (8,) * 4, "made up")
    return VirtualModel(table, ExitProfile((1.0, 1.0, 0.5, 0.5)), edges=(EDGE,))


def driver() -> Driver:
    first = Stage(0, EDGE, 1, "all", (0.002,), ramps=frozenset({EDGE - 1}))
    then = Stage(EDGE, 4, 1, "large", (0.001,))
    groups = {"all": ["small"], "large": ["large"]}
    workers = LocalWorkers({name: SplitReplica(model(SLOW_S)) for names in groups.values() for name in names})
    route = Route((first, then), edges=(EDGE,))
    return Driver(Dispatcher(route, groups, Limits(slack=0.0)), workers, time.perf_counter)


async def test_answers_say_which_level_gave_them_and_stats_each_level_s_share() -> None:
    made = driver()
    packed = [pack(model(SLOW_S).encode([one])) for one in (EASY, HARD)]
    (easy,), (hard,) = await asyncio.gather(*(made.answer(one, 60.0) for one in packed))
    stats = stats_of([state_of(made)])
    await made.close()
    assert (easy.level, easy.exit_block, hard.level, hard.exit_block) == (0, 1, 1, 3)
    assert stats["levels"] == [
        {"blocks": [0, 2], "answered": 1, "share": 0.5},
        {"blocks": [2, 4], "answered": 1, "share": 0.5},
    ]


async def test_the_directory_of_a_cascade_is_served_without_a_plan(tmp_path: Path) -> None:
    service = Service(AppConfig(model=str(cascade_directory(tmp_path)), slo_ms=60_000), time.perf_counter)
    await service.open()
    texts = ["the film is good", "dull", "not bad but great"]
    content = Content(service.encoded(texts), list[Answer])
    answers = await service.answer(service.register("", 0, {}), lambda: content)
    stats = await service.stats()
    await service.close()
    expected = load_served(tmp_path).predict(texts)
    assert [(one.label, one.exit_block) for one in answers] == [(one.label, one.exit_block) for one in expected]
    assert [one.level for one in answers] == [int(one.exit_block >= 4) for one in expected]
    assert [level["blocks"] for level in stats["levels"]] == [[0, 4], [4, 7]]


def test_a_replica_loads_the_levels_that_the_plan_gives_to_its_kind(tmp_path: Path) -> None:
    cascade_directory(tmp_path)
    table = LatencyTable("cpu", (1,), ((1e-3,) * 7,), ((0.0,) * 7,), 0.0, (8,) * 7, (8,) * 7, "made up")
    tables = (table, replace(table, kind="v100"))
    save(Profile("both", tables, ExitProfile((1.0,) * 7), edges=(4,)), tmp_path / "profile.json")
    here, there = Placement("cpu", 1, (Split(0, 4, 1, (1, 3)),)), Placement("v100", 1, (Split(4, 7, 1),))
    (tmp_path / "plan.json").write_text(Plan((here, there)).to_json())
    config = AppConfig(model=str(tmp_path), plan=str(tmp_path / "plan.json"), profile=str(tmp_path / "profile.json"))
    small, large = load_model(config, "cpu", str(tmp_path)).levels
    assert (small.is_loaded, large.is_loaded) == (True, False)
    front = load_front_model(config, str(tmp_path))
    assert not any(level.is_loaded for level in front.levels), "it only encodes"
