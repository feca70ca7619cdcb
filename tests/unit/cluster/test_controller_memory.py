"""A controller's memory belongs to one deployment of its application, and shows in brief what others left."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.memory import KEEP, SHOWN, Memory, configuration_of, deployment_of
from isobatch.deployments import ray_facts
from isobatch.deployments.config import AppConfig
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.profiles.errors import UserError
from isobatch.profiles.windows import Window
from tests.helpers.fluid_application import Fluid, control_loop, first_plan, question, run

CONTROLLER = ControllerConfig()


class Clusters:
    """Some Rays, each with what it remembers; `now` is the one that this process is connected to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begin()
        monkeypatch.setattr(ray_facts, "recall", lambda key: self.now.get(key))
        monkeypatch.setattr(ray_facts, "remember", lambda key, text: self.now.update({key: text}))

    def begin(self) -> None:
        self.now = dict[str, str]()


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Clusters:
    return Clusters(monkeypatch)


@pytest.fixture(scope="module")
def decisions() -> list[Any]:
    app = Fluid(asked := question(), first_plan(asked))
    return run(app, control_loop(app), 1000)


@contextmanager
def deployed(root: Path, configuration: str, now_s: float = 1e9, application: str = "shop") -> Iterator[Memory]:
    with closing(Memory(str(root), application, deployment_of(application, configuration, now_s))) as memory:
        yield memory


def seen(at_s: float) -> Window:
    return Window(at_s, 120.0, 10, (6, 4))


def test_only_a_restarted_controller_finds_its_memory(tmp_path: Path, clusters: Clusters) -> None:
    with deployed(tmp_path, "a") as memory:
        memory.history().append(seen(0.0))
    with deployed(tmp_path, "a", 1e9 + 3600) as memory:
        assert memory.history().windows == (seen(0.0),)
        assert not memory.earlier
    with deployed(tmp_path, "a", application="another") as memory:
        assert not memory.history().windows
    with deployed(tmp_path, "b", 1e9 + 7200) as memory:
        assert not memory.history().windows
        assert [each.began_s for each in memory.earlier] == [1e9]
    clusters.begin()
    with deployed(tmp_path, "b", 1e9 + 9000) as memory:
        assert not memory.history().windows
        assert [each.began_s for each in memory.earlier] == [1e9 + 7200, 1e9]


def test_a_deployment_has_one_controller_on_each_ray(tmp_path: Path, clusters: Clusters) -> None:
    with deployed(tmp_path, "a", 1e9):
        with pytest.raises(UserError, match="another controller of 'shop' runs"), deployed(tmp_path, "a"):
            pass
        clusters.begin()
        with deployed(tmp_path, "a", 1e9 + 60) as beside:
            assert not beside.earlier, "the other has not ended"
    with deployed(tmp_path, "a", 1e9 + 90) as again:
        assert [each.began_s for each in again.earlier] == [1e9]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 30), max_size=KEEP + 3), living=st.integers(0, KEEP + 3))
def test_the_latest_that_ended_are_told_in_brief_and_the_oldest_deleted(
    lengths: list[int], living: int, tmp_path_factory: pytest.TempPathFactory, clusters: Clusters, decisions: list[Any]
) -> None:
    root, ended, lives = tmp_path_factory.mktemp("memory"), list[float](), list[Memory]()
    for number, length in enumerate(lengths):
        clusters.begin()
        began_s = 1e9 + 1000.0 * number
        memory = Memory(str(root), "shop", deployment_of("shop", "a", began_s))
        events = memory.events()
        for index in range(length):
            events.add(replace(decisions[0], number=index + 1, at_s=began_s + index, why=f"reason {index}"))
        if number == living:
            lives.append(memory)
        else:
            memory.close()
            ended.append(began_s)
    clusters.begin()
    old = root / "shop" / "not-of-ours"
    old.mkdir(parents=True)
    with deployed(root, "a", 2e9) as memory:
        assert [each.began_s for each in memory.earlier] == ended[::-1][:KEEP]
        assert all(each.ended_s >= each.began_s for each in memory.earlier)
        assert sum(len(each.events) for each in memory.earlier) <= SHOWN
        for each in memory.earlier:
            length = lengths[round((each.began_s - 1e9) / 1000)]
            assert len(each.events) == min(length, SHOWN // len(memory.earlier))
            assert not length or each.events[-1].why == f"reason {length - 1}"
        left = {folder.name for folder in (root / "shop").iterdir()}
        assert len(left) == 2 + len(lives) + min(KEEP, len(ended)), "this one, what is not ours, those that run"
        assert {old.name, memory.folder.name, *(each.folder.name for each in lives)} <= left
    for each in lives:
        each.close()


def test_a_configuration_is_known_by_what_decides_and_by_what_its_files_hold(tmp_path: Path) -> None:
    numbers = count()

    def written(name: str) -> str:
        (path := tmp_path / name).write_text(str(next(numbers)))
        return str(path)

    app = AppConfig(backend="virtual", profile=written("profile.json"))
    known = [configuration_of(CONTROLLER, app)]
    same = ControllerConfig(memory="/elsewhere", log_format="json", api_key_variable="KEY")
    assert configuration_of(same, app) == known[0]
    known.append(configuration_of(ControllerConfig(least_gain=0.1), app))
    known.append(configuration_of(CONTROLLER, app.model_copy(update={"slo_ms": 7.0})))
    written("profile.json")
    known.append(configuration_of(CONTROLLER, app))
    (tmp_path / "net").mkdir()
    prepared = AppConfig(model=str(tmp_path / "net"), profile=app.profile)
    known.append(configuration_of(CONTROLLER, prepared))
    written("net/exits.json")
    known.append(configuration_of(CONTROLLER, prepared))
    decoder = DecoderConfig(model=str(tmp_path / "net"), profile=app.profile)
    known.append(configuration_of(CONTROLLER, decoder))
    written("net/exits.json")
    known.append(configuration_of(CONTROLLER, decoder))
    assert len({*known}) == len(known)
