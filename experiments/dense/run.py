"""Claim: exits with bridges (PAME) answer maps earlier and raise goodput, within a promise of agreement.

No weights are downloaded: a small SegFormer is trained here on drawn scenes of scikit-learn's digits, and
`prepare` gives it bridges. Everything runs in process, on one thread, and counts by its own processor time. The
promise is that of other pictures at most 1 % of the pixels get another label than from the full network, 95 % sure.

Latency: batches of 2, 4 and 8 fresh pictures, in full and with the exits that pay at that batch size; the batch gets
smaller where pictures leave. Goodput: what one device sustains within an SLO, with constant batches, by plans from the
measured times; in full and with early exit in batches that shrink beside it. The promise is repeated on random parts
of recorded pictures. The figures of a part are kept when it ends, so that an interrupted run goes on with the next.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, combinations
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console

from experiments.shared.kept_parts import kept_part, place_of
from experiments.shared.scenes import NAMES, Scenes, drawn, scene_network
from isobatch.cluster.bench.compare import CONSTANT, NAIVE, STOCK, Bench, alone
from isobatch.cluster.bench.real_device import Source
from isobatch.cluster.profiling.block_times import images, timed
from isobatch.deployments.dispatch.route import stops
from isobatch.deployments.exits import confidence
from isobatch.deployments.models import TorchModel, load
from isobatch.deployments.models.checkpoint import task_at
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.prepare.bridges import PixelSample, picture_tables
from isobatch.deployments.prepare.measuring import PrepareOptions, retuned
from isobatch.deployments.prepare.pipeline import prepare
from isobatch.deployments.prepare.sample import Parts, Sample
from isobatch.deployments.progress import show
from isobatch.optimizer import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.tuning import tuned
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import outcome
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.losses import Floats, Indices
from isobatch.profiles.measure import stopwatch_for
from isobatch.profiles.model import Batch

STEPS, DEPTHS = 1200, (3, 3, 3)
PREPARED_WITH, FRESH, RECORDED = 3000, 800, 4000  # scenes, each drawn anew
ALLOWED, SURE, REPEATS = 0.01, 0.95, 100
BATCHES, LARGEST, PROFILE_S = (2, 4, 8), 32, 30.0
SLO_OVER_ONE = 8.0  # the SLO in times of one picture alone in full
TRIAL_S, ROUNDS = 2.0, 3
MOST_OPEN = 2  # exits with bridges that are tried together
KIND, GAP = "host", 0.01
console = Console(stderr=True, width=140)


def measure(repeats: int = REPEATS, again: int = 0) -> dict[str, float]:
    """`again=1`: measure also what the same code has measured on this machine before."""
    out, threads = place_of("dense", "prepared"), torch.get_num_threads()
    if again and out.exists():
        rmtree(out)
    torch.set_num_threads(1)
    try:
        return _figures(out, repeats, bool(again))
    finally:
        torch.set_num_threads(threads)


def _figures(out: Path, repeats: int, again: bool) -> dict[str, float]:
    """The figures of all parts; the network and each part are kept when they end."""
    networks = cache(partial(_networks, out))
    if not out.exists():
        _prepare(out)
    parts: dict[str, Callable[[], Iterator[tuple[str, float]]]] = {
        "costs": lambda: ((f"exit_cost_{block}", share) for block, share in enumerate(networks().exit_costs)),
        "latencies": lambda: networks().latencies(),
        "goodput": lambda: networks().goodput(),
        "promise": lambda: _promise(load(out), repeats),
    }
    figures = dict[str, float]()
    for name, part in parts.items():
        figures |= kept_part("dense", name, f"{repeats}", again, part, console)
    return figures


def _prepare(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as folder:
        plain, made = Path(folder, "plain"), Path(folder, "prepared")
        scene_network(plain, STEPS, DEPTHS, lambda steps: show(steps, "training the network"))
        scenes = drawn(PREPARED_WITH, seed=1)
        sample = Sample(list(scenes.pictures), None, Parts.of(PREPARED_WITH), task=task_at(plain))
        options = PrepareOptions(f"{confidence.__module__}:confidence", metric="agreement", max_accuracy_loss=ALLOWED)
        prepare(plain, sample, made, options)
        made.rename(out)


def _networks(out: Path) -> "Networks":
    model = load(out)
    (measured,) = timed(model, [images(model, 32, 1)], KIND, "float32", PROFILE_S, LARGEST)
    return Networks(model, Evidence.read(out / EVIDENCE), measured.table, drawn(FRESH, seed=2))


@dataclass(frozen=True)
class Networks:
    """A prepared network, its times on this machine, and pictures that it has not seen."""

    model: TorchModel
    evidence: Evidence
    table: LatencyTable
    fresh: Scenes

    @property
    def exit_costs(self) -> list[float]:
        """Of each exit with its bridge, as a share of the whole network, for a picture alone."""
        whole = float(self.table.block_times_s(1.0).sum())
        return [float(each) / whole for each in self.table.ramp_times_s(1.0)[:-1]]

    def with_thresholds(self, chosen: Indices) -> TorchModel:
        rules = retuned(self.model.ramps.rules, self.evidence, chosen)
        return self.model.with_ramps(Ramps(rules, self.model.ramps.heads))

    def latencies(self) -> Iterator[tuple[str, float]]:
        ratios = []
        for size in BATCHES:
            opened, costs = min(self._choices(size), key=lambda choice: self._hoped(*choice))
            network = self.with_thresholds(self.evidence.proven_candidates(opened, costs))
            (full_ms, full), (exits_ms, labels) = (_timed(network, self.fresh, size, each) for each in ((), opened))
            ratios.append(exits_ms / full_ms)
            yield f"latency_{size}", ratios[-1]
            yield f"opened_{size}", float(len(opened))
            yield f"pixels_lost_{size}", float((labels != full).mean())
        truth = _on_grid(self.fresh.labels, round(full.shape[1] ** 0.5))
        yield "latency", float(np.mean(ratios))
        yield "pixels_right_full", float((full == truth).mean())
        yield "mean_iou_full", mean_iou(truth, full)
        yield f"mean_iou_{BATCHES[-1]}", mean_iou(truth, labels)

    def _choices(self, size: int) -> Iterator[tuple[tuple[int, ...], Floats]]:
        """Sets of exits, and what pictures cost that leave at each exit or at the end, with these exits open."""
        block_s, ramp_s = self.table.block_times_s(float(size)), self.table.ramp_times_s(float(size))
        every = range(self.model.num_blocks - 1)
        for opened in chain.from_iterable(combinations(every, count) for count in range(MOST_OPEN + 1)):
            spent = np.cumsum(block_s + np.where(np.isin(np.arange(len(ramp_s)), opened), ramp_s, 0.0))
            yield opened, spent / block_s.sum()

    def _hoped(self, opened: Sequence[int], costs: Floats) -> float:
        shape = replace(self.evidence.shape, costs=costs)
        return shape.cost(shape.places(self.evidence.likely_candidates(opened, costs)))

    def goodput(self) -> Iterator[tuple[str, float]]:
        slo_s = SLO_OVER_ONE * float(self.table.block_times_s(1.0).sum())
        profile = Profile("scenes", (self.table,), self.evidence.exits(self.evidence.prepared))
        facts, objective = alone(profile, KIND), Objective(slo_s=slo_s, max_batch=LARGEST)
        better = tuned(facts, objective, self.evidence, lambda problem: side_by_side(problem, objective, GAP))
        chosen = better.chosen if better else self.evidence.prepared
        network = self.with_thresholds(chosen)
        inputs = [network.encode([picture]) for picture in self.fresh.pictures]
        watch, tuned_profile = stopwatch_for("cpu"), replace(profile, exits=self.evidence.exits(chosen))
        bench = Bench(network, tuned_profile, KIND, Source(inputs), watch, LARGEST)
        rows = {row.system: row for row in bench.compare([1e3 * slo_s], TRIAL_S, ROUNDS, console.print)}
        for system, name in ((STOCK, "full"), (NAIVE, "early_exit"), (CONSTANT, "constant")):
            yield f"goodput_{name}_per_s", rows[system].goodput_per_s
        yield "goodput_over_no_exits", rows[CONSTANT].goodput_per_s / rows[STOCK].goodput_per_s
        yield "goodput_over_early_exit", rows[CONSTANT].goodput_per_s / max(rows[NAIVE].goodput_per_s, 1e-9)


def _timed(network: TorchModel, scenes: Scenes, size: int, ramps: Sequence[int]) -> tuple[float, Indices]:
    """The mean time until a picture is answered (ms), in batches of one size, and all labels."""
    watch, took_ms, labels = stopwatch_for("cpu"), list[float](), list[Indices]()
    for start in range(0, len(scenes.pictures), size):
        batch: Batch | None = network.encode(list(scenes.pictures[start : start + size]))
        rows, spent_s, found = np.arange(size), 0.0, dict[int, Indices]()
        for stop in stops(0, network.num_blocks, ramps):
            assert batch is not None, "This is a bug: pictures are left."
            launched, part_s = watch(partial(network.run, batch, stop, ramps))
            spent_s += part_s
            exits = launched.exits
            took_ms += [1e3 * spent_s] * len(exits)
            found |= {
                int(rows[row]): np.array(label) for row, (label, _) in zip(exits.rows, exits.answers(), strict=True)
            }
            rows, batch = np.delete(rows, exits.rows), launched.survivors
            if batch is None:
                break
        labels += [found[row] for row in range(size)]
    return float(np.mean(took_ms)), np.array(labels)


def _on_grid(labels: Indices, side: int) -> Indices:
    """The label in the middle of each pixel of a map of this side."""
    places = ((np.arange(side) + 0.5) * (labels.shape[1] / side)).astype(int)
    return labels[:, places][:, :, places].reshape(len(labels), -1)


def mean_iou(truth: Indices, labels: Indices) -> float:
    """The mean over labels of intersection over union.

    >>> mean_iou(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])) == (1 / 2 + 2 / 3) / 2
    True
    """
    count = len(NAMES)
    both = np.bincount(truth.ravel() * count + labels.ravel(), minlength=count**2).reshape(count, count)
    union = both.sum(axis=0) + both.sum(axis=1) - np.diag(both)
    return float((np.diag(both) / np.maximum(union, 1))[union > 0].mean())


def _promise(model: TorchModel, repeats: int) -> Iterator[tuple[str, float]]:
    """How often other pictures lose more than is promised, where the parts of the recorded pictures are drawn anew."""
    recorded, rules = list(drawn(RECORDED, seed=4).pictures), model.ramps.rules
    pictures = PixelSample(model.with_ramps(Ramps()), recorded, None)
    bridges = [model.ramps.heads[rule.block] for rule in rules.ramps]
    temperatures = [*(rule.temperature for rule in rules.ramps), rules.head_temperature]
    with torch.inference_mode():
        tables = picture_tables(pictures, bridges, temperatures, np.arange(RECORDED), model.ramps.policy)
    table, losses, kept = tables[rules.most_unsure], list[float](), 0
    for repeat in show(range(repeats), "repeating the promise"):
        order = np.random.default_rng(repeat).permutation(RECORDED)
        shape, test, others = (table.of(part) for part in np.split(order, [RECORDED // 4, RECORDED // 2]))
        evidence = Evidence(shape, test, "agreement", ALLOWED, SURE)
        found = outcome(others, evidence.prepared, "agreement")
        losses.append(float(found.lost.mean))
        kept += found.cost < 1.0
    yield "promise_broken", float(np.mean(np.array(losses) > ALLOWED))
    yield "promise_lost", float(np.mean(losses))
    yield "promise_used", kept / repeats
