"""A controller's memory belongs to one deployment of its application, and shows in brief what others left."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.memory import Memory, configuration_of, deployment_of
from isobatch.deployments import ray_facts
from isobatch.deployments.config import AppConfig
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.profiles.errors import UserError
from isobatch.profiles.windows import Window

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
    with deployed(tmp_path, "a", application="another") as memory:
        assert not memory.history().windows
    with deployed(tmp_path, "b", 1e9 + 7200) as memory:
        assert not memory.history().windows
    clusters.begin()
    with deployed(tmp_path, "b", 1e9 + 9000) as memory:
        assert not memory.history().windows


def test_a_deployment_has_one_controller_on_each_ray(tmp_path: Path, clusters: Clusters) -> None:
    with deployed(tmp_path, "a", 1e9):
        with pytest.raises(UserError, match="another controller of 'shop' runs"), deployed(tmp_path, "a"):
            pass
        clusters.begin()
        with deployed(tmp_path, "a", 1e9 + 60):
            assert len(list((tmp_path / "shop").iterdir())) == 2, "the other has not ended"
    with deployed(tmp_path, "a", 1e9 + 90) as again:
        assert list((tmp_path / "shop").iterdir()) == [again.folder]


def test_a_configuration_is_known_by_what_decides_and_by_what_its_files_hold(tmp_path: Path) -> None:
    numbers = count()

    def written(name: str) -> str:
        (path := tmp_path / name).write_text(str(next(numbers)))
        return str(path)

    app = AppConfig(backend="virtual", profile=written("profile.json"))
    known = [configuration_of(CONTROLLER, app)]
    same = ControllerConfig(memory="/elsewhere", log_format="json", api_key_variable="KEY", allowed_hosts=("a.de",))
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
