"""One device in virtual time: real launches, the dispatcher that serves, and three systems under the same rule."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from experiments.shared import scenes
from isobatch.cluster.bench import compare
from isobatch.cluster.bench.compare import CONSTANT, NAIVE, STOCK, Bench, alone, sustained
from isobatch.cluster.bench.real_device import GROUP, DeviceTrial, Source, scored, tried
from isobatch.cluster.bench.setup import BenchRequest, drawn, make, with_recorded_exits
from isobatch.cluster.load.workloads import arrivals
from isobatch.deployments.dispatch.route import route_of
from isobatch.deployments.folders import hash_of
from isobatch.deployments.models import load
from isobatch.deployments.models.ramps import ExitRules, RampRule, make_head, read_rules, save_ramps
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.model import Batch, Launched, SplitModel
from tests.helpers.commands import ran
from tests.helpers.interruptions import interrupt_sweep
from tests.helpers.tiny_networks import hugging_face, network, random_inputs
from tests.helpers.tiny_pixels import upernet
from tests.helpers.tiny_tokenizers import save_tokenizer
from tests.helpers.toy_model import BLOCKS, RAMPS, Toy

LAUNCH_S, BLOCK_S, FLOOR = 0.0004, 0.001, 16
SURVIVAL = (1.0, 0.5, 0.5, 0.25)
SIZES = (1, FLOOR, 32, 64)


class Timed(Toy):
    """A block takes a millisecond for up to 16 inputs, and in proportion beyond; every call has its own cost."""

    took_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []  # blocks behind which inputs left

    def run(self, batch: Batch, stop: int, ramps: Collection[int]) -> Launched:
        self.took_s = LAUNCH_S + (stop - batch.cursor) * BLOCK_S * max(1.0, len(batch) / FLOOR)
        launched = super().run(batch, stop, ramps)
        self.left += launched.exits.blocks.tolist()
        return launched

    def stopwatch(self, call: Callable[[], Launched]) -> tuple[Launched, float]:
        return call(), self.took_s


@pytest.fixture
def profile() -> Profile:
    rows = tuple((BLOCK_S * max(1.0, size / FLOOR),) * BLOCKS for size in SIZES)
    ramps = tuple((0.0,) * BLOCKS for _ in SIZES)
    table = LatencyTable("cpu", SIZES, rows, ramps, LAUNCH_S, (64,) * BLOCKS, (64,) * BLOCKS, "made up")
    return Profile("toy", (table,), ExitProfile(SURVIVAL))


def source(toy: Toy, count: int = 400) -> Source:
    """Half leave at the ramp after block 0, a quarter at the one after block 2, the rest at the end."""
    random = np.random.default_rng(0)
    blocks = random.choice([0, 2, 3], count, p=[0.5, 0.25, 0.25])
    labels = random.integers(0, 9, count)
    inputs = [toy.encode([[int(block), int(label)]]) for block, label in zip(blocks, labels, strict=True)]
    return Source(inputs, labels)


TURNS = Plan((Placement("cpu", 1, (Split(0, 1, 16, (0,)), Split(1, 4, 16, (2,)))),))


@pytest.mark.parametrize("rate", [200.0, 20_000.0])
def test_every_input_is_answered_once_or_not_at_all(profile: Profile, rate: float) -> None:
    toy = Timed()
    route = route_of(TURNS, alone(profile, "cpu"), [GROUP])
    record = tried(route, toy, toy.stopwatch, source(toy), 0.05, arrivals("poisson", rate, 1.0, 0))
    assert set(toy.left) == {*RAMPS, BLOCKS - 1}
    assert len(record.latencies_s) <= record.offered
    assert min(record.latencies_s) >= LAUNCH_S + BLOCK_S - 1e-9
    if rate < 1000:
        assert record.keeps_slo
        assert len(record.latencies_s) == len(toy.left) == record.offered
        assert np.mean(np.array(toy.left) == 0) == pytest.approx(0.5, abs=0.1)
    else:
        assert not record.keeps_slo
        assert max(toy.sizes) == 16, "under load batches fill up, and no further"


def test_systems_are_scored_on_the_same_inputs_whatever_their_load(profile: Profile) -> None:
    """Each is right about the inputs that leave where it lets them; trials of other lengths change nothing."""
    toy = Timed()
    all_right = source(toy, 70)
    accuracy, depth = scored(toy, all_right, (0, 2))
    assert (accuracy, depth) == (1.0, pytest.approx((0.5 * 1 + 0.25 * 3 + 0.25 * 4) / BLOCKS, abs=0.1))
    assert scored(toy, all_right, ()) == (1.0, 1.0)
    half = Source(all_right.inputs, np.where(np.arange(70) < 35, all_right.labels, 99))
    rows = list(Bench(toy, profile, "cpu", half, toy.stopwatch).compare([60.0], seconds=0.1, rounds=1))
    assert {row.accuracy for row in rows} == {0.5}


def test_a_rate_that_is_lost_already_is_not_computed_to_the_end(profile: Profile) -> None:
    toy = Timed()
    route, due_s = route_of(TURNS, alone(profile, "cpu"), [GROUP]), arrivals("poisson", 20_000.0, 1.0, 0)
    record = tried(route, toy, toy.stopwatch, source(toy), 0.05, due_s)
    assert (record.keeps_slo, record.offered) == (False, len(due_s))
    assert sum(toy.sizes) < 0.2 * len(due_s)


def test_constant_batches_sustain_most_and_nothing_beats_the_bound(profile: Profile) -> None:
    toy = Timed()
    bench = Bench(toy, profile, "cpu", source(toy), toy.stopwatch, max_batch=FLOOR)  # a smaller batch saves nothing
    rows = {row.system: row for row in bench.compare([60.0], seconds=0.15, rounds=1)}
    assert set(rows) == {STOCK, NAIVE, CONSTANT}
    best = rows[CONSTANT].goodput_per_s
    assert best > 1.1 * rows[STOCK].goodput_per_s
    assert best > 1.1 * rows[NAIVE].goodput_per_s
    assert all(0 < row.share_of_bound <= 1 for row in rows.values())
    assert all(row.p99_ms is not None and row.p99_ms <= 1.01 * 60 for row in rows.values())
    assert all(row.accuracy == 1.0 for row in rows.values())


@pytest.mark.parametrize("limit", [37.0, 99.0, 500.0])
def test_a_rate_is_found_by_bisection(limit: float) -> None:
    def at(rate: float) -> DeviceTrial:
        return DeviceTrial(rate, 1.0, offered=100, latencies_s=[0.5 if rate <= limit else 1.5] * 100)

    result = sustained(at, 0.0, 100.0)
    assert min(limit, 100.0) * 0.9 < result.seconds <= min(limit, 100.0)
    assert sustained(at, limit, 600.0) is None, "3 % more is not possible"


def test_a_network_that_labels_pixels_is_compared_by_its_load_alone() -> None:
    model = load(upernet("convnext"))
    pictures = Source([model.encode([picture]) for picture in scenes.drawn(3, seed=1).pictures])
    assert scored(model, pictures, ()) == (None, 1.0)
    whole, blocks = Plan((Placement("cpu", 1, (Split(0, 6, 2, ()),)),)), (64,) * 6
    table = LatencyTable("cpu", (1, 2), ((BLOCK_S,) * 6,) * 2, ((0.0,) * 6,) * 2, LAUNCH_S, blocks, blocks, "made up")
    facts = alone(Profile("scenes", (table,), ExitProfile((1.0,) * 6)), "cpu")

    def stopwatch(call: Callable[[], Launched]) -> tuple[Launched, float]:
        return call(), BLOCK_S

    record = tried(route_of(whole, facts, [GROUP]), model, stopwatch, pictures, 0.5, np.arange(5) * 0.1)
    assert (len(record.latencies_s), record.keeps_slo) == (5, True)


def test_inputs_leave_where_they_are_told_to_on_real_ramps() -> None:
    exact = with_recorded_exits(network("bert", "entropy", [0.5]))
    batch = exact.merge(random_inputs("bert", 50, seed=1))
    result = drawn(batch, ExitProfile((1.0, 0.6, 0.4, 0.2)), np.random.default_rng(0))
    exits = exact.run(result, 4, exact.ramp_blocks).exits
    assert exits.blocks.tolist() == result.memory[:, 0].astype(int).tolist()
    assert 0.5 < (exits.blocks > 0).mean() < 0.7
    only_last = exact.run(result, 4, (2,)).exits
    assert set(only_last.blocks.tolist()) == {2, 3}
    assert exact.ramps.observed((2,)) == {2}, "others are not computed for the sake of their memory"
    assert with_recorded_exits(network("vit"), everywhere=True).ramp_blocks == (0, 1, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-ee"
    hugging_face("bert").save_pretrained(folder)
    save_tokenizer(folder, ["the", "film"])
    rules = ExitRules(ramps=(RampRule(block=1, threshold=0.99, survival=0.5),))
    save_ramps(folder, rules, {1: make_head("light", 32, 3)})
    return folder


@pytest.mark.parametrize(("with_data", "backend"), [(True, "torch"), (False, "tests.helpers.toy_backend:TOY")])
def test_it_prints_json(
    checkpoint: Path, tmp_path: Path, with_data: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any backend of a server."""
    monkeypatch.setattr(compare, "STEPS", 1)  # how well a rate is found is tested above
    (tmp_path / "inputs.csv").write_text("words;verdict\nthe film;yes\n" + "the;no\n" * 9)
    command = [
        "bench",
        str(checkpoint),
        "--backend",
        backend,
        "--slo-ms",
        "200",
        "--seconds",
        "0.1",
        "--timing-s",
        "0.2",
    ]
    columns = ["--text-column", "words", "--label-column", "verdict", "--labels", "yes=1,no=0", "--delimiter", ";"]
    data = ["--data", str(tmp_path / "inputs.csv"), *columns] if with_data else []
    out = ["--largest", "4", "--device", "cpu", "--json", "--out", str(tmp_path / "bench.json")]
    result = json.loads(ran(*command, *data, *out))
    assert [row["system"] for row in result["rows"]] == [STOCK, NAIVE, CONSTANT]
    assert f"cpu, {'torch' if with_data else 'toy'}, float32" in result["measured"]
    assert all((row["accuracy"] is not None) == with_data for row in result["rows"])
    (gain,) = result["batch_gains"]
    assert (gain["slo_ms"], gain["kind"]) == (200.0, "cpu")
    assert 1 <= gain["batch"] <= 4, "the largest that the budget bore"


def test_rows_that_ramps_were_trained_on_are_not_counted(checkpoint: Path, tmp_path: Path) -> None:
    (data := tmp_path / "inputs.csv").write_text("text,label\n" + "the film,1\nthe,0\n" * 20)
    rules = read_rules(checkpoint / "exits.json")
    request = BenchRequest(str(tmp_path / "ee"), data, "cpu", backend="torch", largest=2, budget_s=0.1)
    for data_hash, inputs in ((hash_of([data]), 14), ("another", 40)):
        copytree(checkpoint, tmp_path / "ee", dirs_exist_ok=True)
        notes = {"data_hash": data_hash, "rows": 40, "seed": 0}
        rules.model_copy(update={"notes": notes}).write(tmp_path / "ee" / "exits.json")
        made, result = make(request)
        assert len(made.source.inputs) == inputs
        known = f"measured with {inputs} inputs of inputs.csv that ramps were not trained on"
        assert (known in result) == (data_hash != "another")


def test_the_first_inputs_are_of_the_whole_file(checkpoint: Path, tmp_path: Path) -> None:
    """Files are often sorted, and a short trial reads the first ones only."""
    (data := tmp_path / "inputs.csv").write_text("text,label\n" + "the film,1\n" * 20 + "the,0\n" * 20)
    made, _ = make(BenchRequest(str(checkpoint), data, "cpu", backend="torch", largest=2, budget_s=0.1))
    lengths = [int(each.lengths[0]) for each in made.source.inputs]
    assert sorted(lengths) == [3] * 20 + [4] * 20
    assert 0 < lengths[:20].count(3) < 20
    assert made.source.labels.tolist() == [length - 3 for length in lengths]


def test_ctrl_c_ends_it_without_a_result(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data := tmp_path / "inputs.csv").write_text("text,label\n" + "the film,1\nthe,0\n" * 20)
    request = BenchRequest(str(checkpoint), data, "cpu", backend="torch", largest=2, budget_s=0.1)

    def some(model: SplitModel, values: Sequence[Any]) -> Iterator[Batch]:
        yield model.encode(values[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("isobatch.cluster.profiling.block_times.in_batches", some)
        with pytest.raises(KeyboardInterrupt):
            make(request)
    interrupt_sweep(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        make(request)


def test_what_is_wrong_is_found_before_anything_is_measured(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--length is for networks that read texts: leave it out"):
        ran("bench", "demo", "--length", 64)
    with pytest.raises(UserError, match=r"cannot write /nonexistent/bench\.json"):
        ran("bench", checkpoint, "--out", "/nonexistent/bench.json")
    (data := tmp_path / "reviews.csv").touch()
    with pytest.raises(UserError, match=f"cannot write {data}: this command uses that file"):
        ran("bench", checkpoint, "--data", data, "--out", data)
    for option, value in (("--label-column", "verdict"), ("--labels", "yes=1"), ("--max-rows", 50)):
        with pytest.raises(UserError, match=f"{option} is for --data: name a file"):
            ran("bench", checkpoint, option, value)
    with pytest.raises(UserError, match="--length is for texts that are made up: leave it out with --data"):
        ran("bench", checkpoint, "--data", "reviews.csv", "--length", 8)
    bare = Path(copytree(checkpoint, tmp_path / "bare"))
    (bare / "exits.json").unlink()
    with pytest.raises(UserError, match="give it some with 'isobatch prepare'"):
        ran("bench", bare, "--device", "cpu")
