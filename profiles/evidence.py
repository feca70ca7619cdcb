"""The evidence for a promise: the exit tables of `isobatch prepare`, stored beside the checkpoint (`exit_table.npz`).

With them, thresholds can be chosen again for the ramps that a plan opens and for the costs of its blocks. Any number of
choices may be rated on the first table (`shape`); the second one (`test`) then limits how far the last choice may go.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args
from zipfile import BadZipFile

import numpy as np

from isobatch.profiles.confidence import shown
from isobatch.profiles.errors import UserError
from isobatch.profiles.exit_table import ARRAYS, OPTIONAL, ExitTable, highest, ladder, outcome
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.losses import ABSOLUTE_ERROR, MEAN_IOU, MICRO_F1, NDCG, OF_ALL, Floats, Indices, Loss, Metric

EVIDENCE = "exit_table.npz"
MAX_LADDERS = 8  # ladders that are cached


@dataclass(frozen=True)
class Evidence:
    """Two tables of the same ramps, and the promise. There is a ramp after every block but the last."""

    shape: ExitTable
    test: ExitTable
    metric: Metric
    max_loss: float
    confidence: float
    _ladders: dict[object, list[Indices]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def for_metric(self, metric: Metric | None) -> "Evidence":
        """The same tables for a promise in another metric; None: in the same one."""
        test = self.test
        if metric and self.metric == "agreement" != metric and (test.right[-1] == 1).all():
            missing = "the model was prepared without any, or the full network gives them all"
            raise UserError(f"--metric {metric} needs labels: {missing}: --metric agreement then says the same")
        if metric == MICRO_F1 and test.marks is None:
            raise UserError(f"--metric {metric} is for networks that give an input several labels")
        if metric == MEAN_IOU and test.iou is None:
            raise UserError(f"--metric {metric} is for networks that label pixels: prepare yours with it")
        if metric == NDCG and test.lists is None:
            raise UserError(f"--metric {metric} is for lists of documents: prepare the network with --queries")
        if metric and (metric == ABSOLUTE_ERROR) != (test.scores is not None) and metric not in ("agreement", NDCG):
            gives = "a score" if metric == ABSOLUTE_ERROR else "labels"
            raise UserError(f"--metric {metric} is for networks that give {gives}")
        if metric and metric not in (*OF_ALL, MICRO_F1, NDCG) and test.agreed is not None:
            raise UserError(f"--metric {metric} is for networks that give an input one label")
        return replace(self, metric=metric or self.metric)

    def shows(self, lost: Loss) -> bool:
        """Whether this loss proves that inputs lose no more than is allowed."""
        return shown(lost, self.max_loss, self.confidence, self.metric)

    @property
    def prepared(self) -> Indices:
        """The candidates that `isobatch prepare` has chosen, with every ramp open and equal costs of all blocks."""
        return self.proven_candidates(range(self.test.num_ramps), self.test.costs)

    def likely_candidates(self, ramps: Sequence[int], costs: Floats) -> Indices:
        """Candidates for these ramps, judged by the table that may be used any number of times; others are shut."""
        return self._highest(self.shape, ramps, costs)

    def proven_candidates(self, ramps: Sequence[int], costs: Floats) -> Indices:
        """Candidates that keep the promise by the test table. Use this once: of many tries, one passes by chance."""
        return self._highest(self.test, ramps, costs)

    def _highest(self, judge: ExitTable, ramps: Sequence[int], costs: Floats) -> Indices:
        chosen, rows = self.shape.strictest, list(ramps)
        if rows:
            rungs = self._ladder(rows, costs, self.metric)
            chosen[rows] = highest(rungs, judge.only(rows, costs), self.metric, self.shows)
        return chosen

    def _ladder(self, ramps: list[int], costs: Floats, metric: Metric) -> list[Indices]:
        """The ladder for these ramps and costs, from the cache: a controller often uses the same one again."""
        key = (tuple(ramps), costs.tobytes(), metric)
        if key not in self._ladders:
            if len(self._ladders) >= MAX_LADDERS:
                self._ladders.clear()
            self._ladders[key] = ladder(self.shape.only(ramps, costs), metric)
        return self._ladders[key]

    def agreeing_candidates(self, ramps: Sequence[int], costs: Floats, most: float) -> Indices:
        """Candidates with which, by the test table, at most the share `most` of answers differs from the full
        network's.

        Half an input is added to those that differ, since none among few rows does not mean none at all: if `most` is
        smaller than that, no input leaves early. This is no promise by itself: audits must watch it.
        """
        chosen, rows = self.shape.strictest, list(ramps)
        if rows and most >= self.smallest_share:
            rungs, test = self._ladder(rows, costs, "agreement"), self.test.only(rows, costs)
            chosen[rows] = highest(rungs, test, "agreement", lambda lost: bool(lost.mean + self.smallest_share <= most))
        return chosen

    def disagreement(self, chosen: Indices) -> float:
        """The share of answers that differ from the full network's, by the test table, with half an input added."""
        return float(outcome(self.test, chosen, "agreement").lost.mean) + self.smallest_share

    @property
    def smallest_share(self) -> float:
        """The least disagreement that the test table can show: half an input."""
        return 0.5 / self.test.num_inputs

    def nearest(self, thresholds: Mapping[int, float]) -> Indices:
        """The candidates nearest to these thresholds; ramps without a threshold are shut."""
        chosen = self.shape.strictest
        for ramp, threshold in thresholds.items():
            chosen[ramp] = np.abs(self.shape.candidates - threshold).argmin()
        return chosen

    def thresholds(self, chosen: Indices, ramps: Sequence[int]) -> tuple[tuple[int, float], ...]:
        return tuple((ramp, float(self.shape.candidates[chosen[ramp]])) for ramp in ramps)

    def survival(self, chosen: Indices) -> tuple[float, ...]:
        """The share of inputs that enter each block with these candidates, by the larger table."""
        places = self.shape.places(chosen)
        return tuple(float((places >= block).mean()) for block in range(self.shape.num_ramps + 1))

    def exits(self, chosen: Indices) -> ExitProfile:
        """The exits with these candidates, with the sets of ramps at which inputs would leave, were they open."""
        sets, counts = np.unique(self.shape.first <= chosen[:, None], axis=1, return_counts=True)
        shares = (counts / counts.sum()).tolist()
        sure = (tuple(np.flatnonzero(column).tolist()) for column in sets.T)
        return ExitProfile(self.survival(chosen), tuple(zip(sure, shares, strict=True)))

    def save(self, path: Path) -> None:
        tables = {"shape": self.shape, "test": self.test}
        arrays = {
            f"{name}_{key}": getattr(table, each) for name, table in tables.items() for each, key in ARRAYS.items()
        }
        optional = {(name, key): getattr(table, key) for name, table in tables.items() for key in OPTIONAL}
        arrays |= {f"{name}_{key}": array for (name, key), array in optional.items() if array is not None}
        terms = np.array([self.max_loss, self.confidence])
        np.savez_compressed(path, metric=np.array(self.metric), terms=terms, **arrays)

    @classmethod
    def read(cls, path: Path) -> "Evidence":
        try:
            with np.load(path, allow_pickle=False) as arrays:
                shape, test = (
                    replace(
                        ExitTable(*(arrays[f"{name}_{key}"] for key in ARRAYS.values())),
                        **{key: arrays.get(f"{name}_{key}") for key in OPTIONAL},
                    )
                    for name in ("shape", "test")
                )
                name, (max_loss, confidence) = str(arrays["metric"]), arrays["terms"].tolist()
            metric = next((each for each in get_args(Metric) if each == name), None)
            if metric is None or not (0 <= max_loss < 1 and 0 < confidence < 1):
                raise ValueError(f"metric = {name!r} and terms = {[max_loss, confidence]} are no promise")
            _check("shape", shape)
            _check("test", test)
            if not np.array_equal(shape.candidates, test.candidates) or len(shape.costs) != len(test.costs):
                raise ValueError("shape and test must have the same candidates and ramps")
        except (OSError, EOFError, TypeError, ValueError, KeyError, BadZipFile, zlib.error) as error:
            raise UserError(f"{path}: is not an exit table of 'isobatch prepare': {error}: prepare again") from None
        return cls(shape, test, metric, max_loss, confidence)


def _check(prefix: str, table: ExitTable) -> None:
    """Raise ValueError unless the arrays of a table are finite numbers for the same ramps and inputs."""
    ramps, inputs = table.first.shape if table.first.ndim == 2 else (0, 0)
    places, each = (ramps + 1, inputs), (inputs,)
    shapes = {
        "candidates": (max(1, table.candidates.size),), "first": (ramps, max(1, inputs)), "truth": each,
        "costs": (ramps + 1,), "marks": (2, *places), "lists": each, "relevance": each,
    }  # fmt: skip
    for name in (*ARRAYS, *OPTIONAL):
        array, key = getattr(table, name), f"{prefix}_{ARRAYS.get(name, name)}"
        if array is None:
            continue
        if array.shape != (shape := shapes.get(name, places)):
            raise ValueError(f"{key} has the shape {array.shape}, and must have {shape}")
        if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise ValueError(f"{key} must hold finite numbers only")
        if name in ("first", "labels", "truth") and (array.dtype.kind == "f" or array.min(initial=0) < 0):
            raise ValueError(f"{key} must hold whole numbers, 0 or more")
    if table.first.max(initial=0) > len(table.candidates):
        raise ValueError(f"{prefix}_first has {table.first.max()}, and must have at most the number of candidates")
    if (np.diff(table.costs, prepend=0.0) < 0).any() or not table.costs[-1]:
        raise ValueError(f"{prefix}_costs must ascend from ramp to ramp, got {table.costs.tolist()}")
