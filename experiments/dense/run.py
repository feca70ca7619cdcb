"""Claim: exits with bridges (PAME) answer maps earlier and raise goodput, within a promise of mean IoU.

A small SegFormer is trained here on drawn scenes of scikit-learn's digits, and `prepare` adds bridges. Except for the
live part, it runs in this process, on one thread, and its processor time counts. The promise, with 95 % confidence, is
that other pictures lose at most 1 % of their mean IoU.

- Latency: batches of 2, 4 and 8 fresh pictures, in full and with the exits that gain at that size; batches shrink.
- Goodput: the sustained rate within an SLO in full, with the plan of `isobatch tune`, and with early exit.
- Promise: made again and again on random parts of recorded pictures.
- Tail: p99 with `isobatch tune --no-later` over that in full at four loads, simulated with measured times.
- Shapes: the cost of exits in a SegFormer-B0 and a UperNet over ConvNeXt-tiny, with random weights.

The figures of a part are kept when it ends, so that an interrupted run continues with the next part. `parts=tail`, then
`parts=live` on an otherwise idle machine, measure the tail over HTTP.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console

from experiments.dense.shapes import exit_costs
from experiments.shared.gains import baseline_plan
from experiments.shared.kept_parts import kept_part, place_of
from experiments.shared.scenes import GRID, NAMES, Scenes, drawn, on_grid, scene_network
from isobatch.cluster.bench.compare import GIVEN, NAIVE, STOCK, Bench, alone
from isobatch.cluster.bench.real_device import Source
from isobatch.cluster.commands.plan import ClassifierPlanOptions
from isobatch.cluster.commands.plan_search import objective_of, planned
from isobatch.cluster.commands.tune import tune
from isobatch.cluster.profiling.block_times import sample_inputs, timed_whole
from isobatch.cluster.simulator.plan_choice import DEFAULT_EFFORT
from isobatch.cluster.simulator.tails import LOADS, Tails
from isobatch.deployments.dispatch.route import stops
from isobatch.deployments.exits import confidence
from isobatch.deployments.folders import PLAN, PROFILE
from isobatch.deployments.models import TorchModel, load
from isobatch.deployments.models.checkpoint import task_at
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.prepare.bridges import PixelSample, picture_tables
from isobatch.deployments.prepare.measuring import PrepareOptions, retuned
from isobatch.deployments.prepare.pipeline import prepare
from isobatch.deployments.prepare.sample import Parts, Sample
from isobatch.deployments.progress import show
from isobatch.optimizer import Objective, Plan, read_plan
from isobatch.optimizer.pipelines.baselines import NO_EXITS, no_later
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import outcome
from isobatch.profiles.files import Profile, save, write_whole
from isobatch.profiles.files import load as read_profile
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.losses import MEAN_IOU, Floats, Indices, Metric, picture_iou
from isobatch.profiles.measure import stopwatch_for
from isobatch.profiles.model import Batch

STEPS, DEPTHS = 2200, (1, 8, 1)  # most blocks in the last region but one, as in PAME's ResNet-101
# Numbers of scenes. Bridges learn from the network's training digits alone: with other digits, the comparison would not
# be fair.
LEARNT, CALIBRATED, TESTED = 1600, 200, 1000
FRESH, RECORDED = 640, 4000
ALLOWED, SURE, REPEATS = 0.01, 0.95, 100
PROMISES: dict[str, Metric] = {"": MEAN_IOU, "_agreement": "agreement"}  # keys are ends of the figures' names
BATCHES, LARGEST, PROFILE_S = (2, 4, 8), 32, 20.0
SLO_OVER_ONE = 8.0  # the SLO, over the time of one picture in full
TRIAL_S, ROUNDS = 1.0, 3
MOST_OPEN = 2  # exits with bridges that are tried together
KIND, GAP = "cpu", 0.01
LIVE, LIVE_S = "live", 15  # seconds of each load: the part takes seven minutes
console = Console(stderr=True, width=140)
Figures = Iterator[tuple[str, float]]


def measure(parts: str = "", repeats: int = REPEATS, again: int = 0, live_s: int = LIVE_S) -> dict[str, float]:
    """`parts`: names with commas; none: all parts except `live`. `live_s`: seconds of each load in the part `live`.

    `again=1`: measure parts again that the same code has measured on this machine.
    """
    out, threads = place_of("dense", "prepared"), torch.get_num_threads()
    for name in ("prepared", "tuned", "no-later") if again else ():
        rmtree(place_of("dense", name), ignore_errors=True)
    torch.set_num_threads(1)
    try:
        return _figures(out, parts, repeats, bool(again), live_s)
    finally:
        torch.set_num_threads(threads)


def _figures(out: Path, parts: str, repeats: int, again: bool, live_s: int) -> dict[str, float]:
    """The figures of these parts; the network and each part are kept when they end."""
    networks = cache(partial(_networks, out))
    known: dict[str, Callable[[], Figures]] = {
        "latencies": lambda: networks().latencies(),
        "goodput": lambda: networks().goodput(),
        "promise": lambda: _promise(load(out), repeats),
        "tail": lambda: networks().tail(),
        "shapes": exit_costs,
        LIVE: lambda: networks().live(live_s),
    }
    wanted = parts.split(",") if parts else [name for name in known if name != LIVE]
    if unknown := set(wanted) - set(known):
        raise UserError(f"parts={','.join(sorted(unknown))}: there are {','.join(known)}")
    if not out.exists():
        _prepare(out)
    figures = dict[str, float]()
    for name in wanted:
        figures |= kept_part("dense", name, f"{repeats} {live_s}", again, known[name], console)
    return figures


def _prepare(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as folder:
        plain, made = Path(folder, "plain"), Path(folder, "prepared")
        scene_network(plain, STEPS, DEPTHS, lambda steps: show(steps, "training the network"))
        learnt, others = drawn(LEARNT, seed=0), drawn(CALIBRATED + TESTED, seed=1)
        labels = on_grid(np.concatenate((learnt.labels, others.labels)), GRID)
        parts = Parts(*np.split(np.arange(len(labels)), [LEARNT, LEARNT + CALIBRATED]))
        sample = Sample([*learnt.pictures, *others.pictures], labels, parts, task=task_at(plain))
        options = PrepareOptions(f"{confidence.__module__}:confidence", metric=MEAN_IOU, max_accuracy_loss=ALLOWED)
        prepare(plain, sample, made, options)
        made.rename(out)


def _networks(out: Path) -> "Networks":
    model, path = load(out), out / PROFILE
    if not path.exists():
        (inputs,) = sample_inputs(model, out, None)
        measured = timed_whole(model, inputs, KIND, "float32", PROFILE_S, LARGEST)
        save(Profile("scenes", (measured.table,)), path)
    return Networks(out, model, Evidence.read(out / EVIDENCE), read_profile(path).tables[0], drawn(FRESH, seed=2))


@dataclass(frozen=True)
class Networks:
    """A prepared network, its times on this machine, and pictures that it has not seen."""

    folder: Path
    model: TorchModel
    evidence: Evidence
    table: LatencyTable
    fresh: Scenes

    @property
    def slo_s(self) -> float:
        return SLO_OVER_ONE * float(self.table.block_times_s(1.0).sum())

    def with_thresholds(self, chosen: Indices) -> TorchModel:
        rules = retuned(self.model.ramps.rules, self.evidence, chosen)
        return self.model.with_ramps(Ramps(rules, self.model.ramps.heads))

    def latencies(self) -> Figures:
        ratios, truth = [], on_grid(self.fresh.labels, GRID)
        for size in BATCHES:
            opened = self._best_exits(size)
            network = self.with_thresholds(self.evidence.proven_candidates(opened, self._costs(opened, size)))
            (full_ms, full), (exits_ms, labels) = (_timed(network, self.fresh, size, each) for each in ((), opened))
            ratios.append(exits_ms / full_ms)
            yield f"latency_{size}", ratios[-1]
            iou, iou_early = (picture_iou(truth, each, len(NAMES)).mean() for each in (full, labels))
            yield f"iou_lost_{size}", float(iou - iou_early)
        yield "latency", float(np.mean(ratios))
        yield "picture_iou_full", float(iou)

    def _best_exits(self, size: int) -> list[int]:
        """Exits chosen one after another, each the best beside the earlier ones, while one more exit gains."""
        best = list[int]()
        for _ in range(MOST_OPEN):
            more = [sorted([*best, exit_]) for exit_ in range(self.model.num_blocks - 1) if exit_ not in best]
            best = min([best, *more], key=lambda opened: self._hoped(opened, size))
        return best

    def _costs(self, opened: Sequence[int], size: int) -> Floats:
        """The time of pictures that leave at each exit or at the end, with these exits open."""
        block_s, ramp_s = self.table.block_times_s(float(size)), self.table.ramp_times_s(float(size))
        spent = np.cumsum(block_s + np.where(np.isin(np.arange(len(ramp_s)), opened), ramp_s, 0.0))
        costs: Floats = spent / block_s.sum()
        return costs

    def _hoped(self, opened: Sequence[int], size: int) -> float:
        costs = self._costs(opened, size)
        shape = replace(self.evidence.shape, costs=costs)
        return shape.cost(shape.places(self.evidence.likely_candidates(opened, costs)))

    def tuned(self, name: str, **options: Any) -> "TunedNetwork":
        """The plan of `isobatch tune` for one device; kept for the live part.

        It is the plan of `isobatch plan` where no thresholds are better than those of `isobatch prepare`.
        """
        out = place_of("dense", name)
        if not out.exists():
            tune(self.folder, self.folder / PROFILE, f"{KIND}=1", out, max_batch=LARGEST, gap=GAP, **options)
        if not out.exists():
            self._plan(out, ClassifierPlanOptions(max_batch=LARGEST, gap=GAP, **options))
        return TunedNetwork(out, read_plan(out / PLAN), read_profile(out / PROFILE))

    def _plan(self, out: Path, options: ClassifierPlanOptions) -> None:
        profile = replace(read_profile(self.folder / PROFILE), exits=self.evidence.exits(self.evidence.prepared))
        plan = planned(options, f"{KIND}=1", profile, objective_of(options)).plan
        copytree(self.folder, out)
        save(profile, out / PROFILE)
        write_whole(out / PLAN, plan.to_json())

    def goodput(self) -> Figures:
        made = self.tuned("tuned", slo_ms=1e3 * self.slo_s)
        network = load(made.folder)
        inputs = [network.encode([picture]) for picture in self.fresh.pictures]
        source, clock = Source(inputs), stopwatch_for("cpu")
        bench = Bench(network, made.profile, KIND, source, clock, LARGEST, given=made.plan)
        rows = {row.system: row for row in bench.compare([1e3 * self.slo_s], TRIAL_S, ROUNDS, console.print)}
        yield "goodput_over_no_exits", rows[GIVEN].goodput_per_s / rows[STOCK].goodput_per_s
        yield "goodput_over_early_exit", rows[GIVEN].goodput_per_s / max(rows[NAIVE].goodput_per_s, 1e-9)

    def no_later(self) -> "tuple[TunedNetwork, Tails]":
        """The plan of `isobatch tune --no-later`, and the tail without exits."""
        made = self.tuned("no-later", no_later=True)
        facts = alone(made.profile, KIND)
        limited = no_later(facts, Objective(max_batch=LARGEST))
        assert limited.slo_s, "This is a bug: a plan that is no later has an SLO."
        stock = baseline_plan(NO_EXITS, facts, limited)
        return made, Tails(facts, stock, limited.slo_s, DEFAULT_EFFORT.last_inputs)

    def tail(self) -> Figures:
        made, tails = self.no_later()
        for share, ratio in zip(LOADS, tails.ratios(made.plan), strict=True):
            yield f"p99_ratio_at_{share}", ratio

    def live(self, lasts_s: float) -> Figures:
        from experiments.dense.live import live_tail

        made, tails = self.no_later()
        return live_tail(tails, made.plan, made.profile, made.folder, self.fresh, lasts_s)


@dataclass(frozen=True)
class TunedNetwork:
    """A network with thresholds for a plan, and its exits and times."""

    folder: Path
    plan: Plan
    profile: Profile


def _timed(network: TorchModel, scenes: Scenes, size: int, ramps: Sequence[int]) -> tuple[float, Indices]:
    """The mean time until a picture is answered (ms), in batches of one size, and all labels."""
    watch, took_ms, labels = stopwatch_for("cpu"), list[float](), list[Indices]()
    network.run(network.encode(list(scenes.pictures[:size])), network.num_blocks, ramps)  # warms up
    for start in range(0, len(scenes.pictures), size):
        batch: Batch | None = network.encode(list(scenes.pictures[start : start + size]))
        rows, spent_s, result = np.arange(size), 0.0, dict[int, Indices]()
        for stop in stops(0, network.num_blocks, ramps):
            assert batch is not None, "This is a bug: pictures are left."
            launched, part_s = watch(partial(network.run, batch, stop, ramps))
            spent_s += part_s
            exits = launched.exits
            took_ms += [1e3 * spent_s] * len(exits)
            result |= {
                int(rows[row]): np.array(label) for row, (label, _) in zip(exits.rows, exits.answers(), strict=True)
            }
            rows, batch = np.delete(rows, exits.rows), launched.survivors
            if batch is None:
                break
        labels += [result[row] for row in range(size)]
    return float(np.mean(took_ms)), np.array(labels)


def _promise(model: TorchModel, repeats: int) -> Figures:
    """How often other pictures lose more than promised, over random parts of the recorded pictures."""
    recorded, rules = drawn(RECORDED, seed=4), model.ramps.rules
    pictures = PixelSample(model.with_ramps(Ramps()), list(recorded.pictures), on_grid(recorded.labels, GRID))
    bridges = [model.ramps.heads[rule.block] for rule in rules.ramps]
    temperatures = [*(rule.temperature for rule in rules.ramps), rules.head_temperature]
    with torch.inference_mode():
        tables = picture_tables(pictures, bridges, temperatures, np.arange(RECORDED), model.ramps.policy)
    table = tables[rules.most_unsure]
    for suffix, metric in PROMISES.items():
        losses, kept = list[float](), 0
        for repeat in show(range(repeats), f"repeating the promise of {metric}"):
            order = np.random.default_rng(repeat).permutation(RECORDED)
            shape, test, others = (table.of(part) for part in np.split(order, [RECORDED // 4, RECORDED // 2]))
            evidence = Evidence(shape, test, metric, ALLOWED, SURE)
            result = outcome(others, evidence.prepared, metric)
            losses.append(float(result.lost.mean))
            kept += result.cost < 1.0
        yield f"promise_broken{suffix}", float(np.mean(np.array(losses) > ALLOWED))
        yield f"promise_used{suffix}", kept / repeats
