"""ONNX Runtime behind a real graph: the demo in two splits answers as the uncut network, also while a cut moves."""

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from isobatch.cluster.controller.application import RunningApplication
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import demo_inputs
from isobatch.deployments.folders import cache_directory
from isobatch.deployments.models import load
from isobatch.deployments.models.onnx_model import GRAPH, GraphSource, fingerprint
from isobatch.deployments.models.served_model import BlockRange
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.asking import ask, eventually, predict
from tests.helpers.uncut import assert_same, uncut
from tests.integration.conftest import Run

pytestmark = pytest.mark.long
BLOCKS, RAMPS = 8, (1, 6)
CACHE = cache_directory() / "onnx"  # the replicas'


def cut_at(cut: int) -> Plan:
    splits = [Split(a, b, 8, tuple(ramp for ramp in RAMPS if a <= ramp < b)) for a, b in ((0, cut), (cut, BLOCKS))]
    return Plan(tuple(Placement("cpu", 1, (split,)) for split in splits))


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Path]:
    """A copy of the demo that nobody has exported yet."""
    before = set(CACHE.glob("*"))
    folder = Path(shutil.copytree(demo_directory(), tmp_path / "demo"))
    (folder / "copy.txt").write_text(uuid.uuid4().hex)
    yield folder
    for path in set(CACHE.glob("*")) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def graph_of(demo: Path) -> Callable[..., Path]:
    """Where the graph of a stretch behind block 0 is, once there is one."""
    origin = GraphSource(fingerprint(demo, load(demo)), torch.device("cpu"), torch.float32)
    return lambda *stretch: CACHE / origin.key(BlockRange(*stretch), {"hidden": torch.zeros(1, 1, 1)}) / GRAPH


@pytest.fixture
def base(deployed: Callable[..., str], demo: Path, tmp_path: Path) -> str:
    """The demo on ONNX Runtime in two splits."""
    (tmp_path / "plan.json").write_text(cut_at(4).to_json())
    rows, weights = ((0.001,) * BLOCKS, (0.002,) * BLOCKS), (1000,) * BLOCKS
    table = LatencyTable("cpu", (1, 8), rows, ((0.0,) * BLOCKS,) * 2, 0.0005, weights, weights, "made up")
    save(Profile("demo", (table,), ExitProfile((1.0,) * BLOCKS)), tmp_path / "profile.json")
    arguments = {
        "model": str(demo),
        "backend": "onnx",
        "plan": str(tmp_path / "plan.json"),
        "profile": str(tmp_path / "profile.json"),
        "cpus_per_replica": 0.1,
        "slo_ms": 60_000,
    }
    return deployed({"name": "demo", "import_path": "isobatch.deployments.app:build", "args": arguments})


Answers = list[tuple[int, dict[str, Any]]]


@contextmanager
def asked_meanwhile(base: str, images: Sequence[Any]) -> Iterator[Answers]:
    """Answers gather by the image that they are about, until the block ends."""
    answers, done = Answers(), Event()

    def client(number: int) -> None:
        while not done.is_set():
            answers.append((number, predict(base, [images[number]])[0]))

    with ThreadPoolExecutor(len(images)) as pool:
        asking = [pool.submit(client, number) for number in range(len(images))]
        try:
            yield answers
        finally:
            done.set()
    for each in asking:
        each.result()


def test_the_demo_on_onnx_answers_as_cuts_move(base: str, demo: Path, graph_of: Callable[..., Path], run: Run) -> None:
    images = demo_inputs(12, seed=7).tolist()
    assert graph_of(2, 4).is_file(), "exported before the replica said that it was ready"
    assert not graph_of(2, 5).exists()
    with asked_meanwhile(base, images) as answers:
        eventually(lambda: len(answers) > 50)
        run(RunningApplication("demo").roll_out(cut_at(5)))
        assert eventually(lambda: graph_of(2, 5).is_file()), "made beside, while torch and the others serve"
        moved = len(answers)
        eventually(lambda: len(answers) > moved + 50)
    assert [each["blocks"] for each in ask(base, "GET", "/stats")[1]["splits"]] == [[0, 5], [5, BLOCKS]]
    expected = uncut(load(demo), images, RAMPS)
    assert len({block for _, block, _ in expected}) == 3
    for number, answer in answers:
        assert_same(answer, expected[number])
