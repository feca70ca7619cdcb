"""Claim: what is promised of accuracy is kept, and how deep inputs must go for that.

The rows of a file are drawn again and again, as `isobatch prepare` would get them. Thresholds are chosen on them, as
now and as before, and tried on all other rows. Beside it, on the same ladder, a bound by betting (Waudby-Smith and
Ramdas, 2023), which is as tight as any that asks nothing of the losses but that they are bounded.

And that it stays so while inputs drift: what audits cost, and what a controller keeps that acts on them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import geometric_mean

import numpy as np

from deployments.prepare.sample import TEST_SHARE
from deployments.progress import show
from experiments.promise.audited import Setting, audit_costs, day, mended
from experiments.promise.before import searched
from experiments.promise.plans import gained
from experiments.promise.tables import Recorded, recorded
from profiles.evidence import Evidence
from profiles.exit_table import Leaving, highest, ladder, outcome
from profiles.losses import OF_ALL, Floats, Indices, Metric

MAX_LOSS, CONFIDENCE, SPLITS = 0.01, 0.95, 200
ROWS = {"sst2": 10_000, "agnews": 5_000, "demo": 10_000}  # of a file; the demo's are digits, each distorted anew
BEFORE_SHARE = 0.2  # of the rows, on which thresholds were chosen before
OF_CLASSES: tuple[Metric, ...] = ("worst-class", "macro-f1", "mcc")
OF_CLASSES_IN = ("sst2", "agnews")
EXACT, BETTING, BEFORE = "", "betting_", "before_"  # as the names of the figures begin


def measure(splits: int = SPLITS) -> dict[str, float]:
    figures = dict[str, float]()
    for name, rows in ROWS.items():
        table = recorded(name)
        figures |= {f"{figure}_{name}": value for figure, value in _tried(table, rows, "accuracy", splits)}
        figures |= {f"{figure}_{name}": value for figure, value in _gained(name, table, rows)}
    gains = [figures[f"plan_thresholds_gain_{name}"] for name in ROWS]
    figures["plan_thresholds_gain"] = geometric_mean(gains)
    agreement = _tried(table, ROWS["demo"], "agreement", splits)
    figures |= {f"{figure}_demo_agreement": value for figure, value in agreement}
    figures |= dict(_watched(table, ROWS["demo"]))
    for name in OF_CLASSES_IN:
        table = recorded(name)
        for metric in OF_CLASSES:
            of_this = f"{name}_{metric.replace('-', '_')}"
            figures |= {f"{figure}_{of_this}": value for figure, value in _tried(table, ROWS[name], metric, splits)}
    return figures


def _tried(table: Recorded, rows: int, metric: Metric, splits: int) -> Iterator[tuple[str, float]]:
    """How often more than was promised is lost by other rows, and how deep these go on average, for each method."""
    seen = defaultdict[str, list[Leaving]](list)
    for seed in show(range(splits), f"{metric}, {rows} rows"):
        order = np.random.default_rng(seed).permutation(table.known.num_inputs)
        others = table.known.of(order[rows:])
        for method, chosen in _chosen(table.of(order[:rows]), metric).items():
            seen[method].append(outcome(others, chosen, metric))
    for method, outcomes in seen.items():
        yield f"{method}exceeded_share", float(np.mean([each.lost.mean > MAX_LOSS for each in outcomes]))
        yield f"{method}depth", float(np.mean([each.cost for each in outcomes]))
        yield f"{method}lost", float(np.mean([each.lost.mean for each in outcomes]))


def _gained(name: str, table: Recorded, rows: int) -> Iterator[tuple[str, float]]:
    order = np.random.default_rng(0).permutation(table.known.num_inputs)
    drawn, others = table.of(order[:rows]), table.of(order[rows:])
    shape, test = _parts(rows)
    evidence = Evidence(drawn.believed.of(shape), drawn.known.of(test), "accuracy", MAX_LOSS, CONFIDENCE)
    yield from gained(name, evidence, others)


def _watched(table: Recorded, rows: int) -> Iterator[tuple[str, float]]:
    """What audits cost, and what a controller that acts on them keeps."""
    order = np.random.default_rng(0).permutation(table.known.num_inputs)
    drawn, others = table.of(order[:rows]), table.known.of(order[rows:])
    shape, test = _parts(rows)
    evidence = Evidence(drawn.believed.of(shape), drawn.known.of(test), "agreement", MAX_LOSS, CONFIDENCE)
    setting = Setting.of(evidence, others)
    yield from audit_costs()
    yield from mended(setting)
    yield from day(setting)


def _parts(rows: int) -> list[Indices]:
    """What a ladder is made from, and what the promise is tested on."""
    return np.split(np.arange(rows), [rows - int(rows * TEST_SHARE)])


def _chosen(drawn: Recorded, metric: Metric) -> dict[str, Indices]:
    rows = np.arange(drawn.known.num_inputs)
    shape, test = _parts(len(rows))
    evidence = Evidence(drawn.believed.of(shape), drawn.known.of(test), metric, MAX_LOSS, CONFIDENCE)
    rungs, tested = ladder(evidence.shape, metric), evidence.test
    chosen = {EXACT: highest(rungs, tested, metric, evidence.shows)}
    if metric not in OF_ALL:
        return chosen
    losses, everyone = tested.losses(metric), np.arange(tested.num_inputs)
    bets = rungs[0]
    for rung in rungs[1:]:
        if not wins(losses[tested.places(rung), everyone], MAX_LOSS, 1 - CONFIDENCE):
            break
        bets = rung
    before = drawn.known.of(rows[: int(len(rows) * BEFORE_SHARE)])
    return chosen | {BETTING: bets, BEFORE: searched(before, metric, MAX_LOSS)}


def wins(losses: Floats, max_loss: float, doubt: float) -> bool:
    """Whether a purse that bets on a loss below `max_loss`, input by input, ever grows to 1 / doubt times what it was.

    A bet is as large as the variance seen so far allows, and never more than half of what could be lost.
    """
    count = len(losses)
    seen = np.arange(1, count + 1)
    means = (max_loss + losses.cumsum()) / (seen + 1)
    variances = (0.25 + ((losses - means) ** 2).cumsum()) / (seen + 1)
    before = np.concatenate(([0.25], variances[:-1]))
    bets = np.minimum(np.sqrt(2 * math.log(1 / doubt) / (count * before)), 0.5 / (1 - max_loss))
    return bool(np.log1p(bets * (max_loss - losses)).cumsum().max() >= math.log(1 / doubt))
