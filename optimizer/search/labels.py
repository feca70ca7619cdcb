"""Partial plans from the first block to the last: all that no other one dominates and no bound rules out.

A label stands before block a and holds the loads of the blocks it has passed. With x + o for label x and option o:

    labels(0) = { nothing used }
    labels(b) = undominated { x + o : x in labels(a), o an option from a that stops at b, bound(x + o) <= limit }

`loads` has one column per placement. x dominates y when it came from the same kind and is no larger in any column, nor
in latency at the highest and at the lowest goodput that matter: any completion of y then completes x at least as well.
If a kind's device holds the whole network, all splits on it share one column, which never costs a replica, as
ceil(x + y) <= ceil(x) + ceil(y). Other kinds have several columns, each with splits that fit into its memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from isobatch.optimizer.effort import EFFORT, SAME, SPARE_BITS, Bools, Effort, Floats, Ints
from isobatch.optimizer.goals.relaxation import Cut
from isobatch.optimizer.search.bounds import through
from isobatch.optimizer.search.options import Options

CHUNK = 256  # points that are compared with each other at once
SPARSE = 8  # if fewer than one of this many pairs of points is left, and ...
FEW = 6  # ... at least this many columns, these are compared for the remaining pairs only, which is faster


@dataclass(frozen=True)
class LabelSet:
    """Arrays with one entry per partial plan, which extends `parent` by `option` on the placement `column`."""

    loads: Floats
    memory: Floats
    work: Floats
    arrivals: Floats
    kind: Ints  # kind of the last split
    origin: Ints  # the block of the parent
    parent: Ints
    option: Ints
    column: Ints

    def __len__(self) -> int:
        return len(self.work)

    def pick(self, rows: Bools | Ints) -> "LabelSet":
        return LabelSet(**{name: array[rows] for name, array in vars(self).items()})

    @classmethod
    def join(cls, parts: Sequence["LabelSet"]) -> "LabelSet":
        names = cls.__dataclass_fields__
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @classmethod
    def nothing(cls, columns: int, kinds: int) -> "LabelSet":
        zeros, none = np.zeros(1), np.full(1, -1)
        empty = np.zeros((1, columns))
        return cls(empty, empty, zeros, zeros, np.full(1, kinds), none, none, none, none)


@dataclass(frozen=True)
class PlacementColumns:
    """The placements that a plan may have: the `kind` of every column, and its memory in bytes (inf: no limit)."""

    kind: Ints
    capacity: Floats

    def of(self, kinds: int) -> list[Ints]:
        """The columns of each kind."""
        return [np.nonzero(self.kind == kind)[0] for kind in range(kinds)]

    def by_kind(self, loads: Floats, kinds: int) -> Floats:
        if len(self.kind) == kinds:
            return loads
        return np.stack([loads[:, self.kind == kind].sum(axis=1) for kind in range(kinds)], axis=1)


@dataclass
class LabelSweep:
    """One sweep over the blocks. `limits[i]` is the largest bound by cut i; it may shrink between sweeps."""

    options: Sequence[Options]
    columns: PlacementColumns
    counts: Floats
    cuts: Sequence[Cut]
    limits: Sequence[float]
    spacings_s: Sequence[float]  # seconds per input at which latencies are compared; none if latency does not matter
    least_goodput_per_s: float  # of any plan that matters
    prices: Floats  # of a device, by kind
    most_dollars: float  # that a plan may cost
    width: int  # the most labels before a block
    proof: bool  # a proof fails, and ends, as soon as it would have to drop a label
    effort: Effort = EFFORT
    by_block: list[LabelSet] = field(default_factory=list)
    dropped: float = np.inf  # the least bound of the labels that were dropped to keep `width`

    def run(self) -> LabelSet:
        """Sweep over all blocks; returns the labels of whole plans."""
        kinds = len(self.counts)
        waiting: list[list[LabelSet]] = [[] for _ in range(len(self.options) + 1)]
        waiting[0].append(LabelSet.nothing(len(self.columns.kind), kinds))
        nothing = LabelSet.nothing(len(self.columns.kind), kinds).pick(np.zeros(0, int))
        for block, options in enumerate(self.options):
            if self.effort.out_of_time():  # only the cuts bound the labels that are not reached
                self.dropped = -np.inf
                return nothing
            labels = LabelSet.join(waiting[block]) if waiting[block] else nothing
            labels = self._narrow(labels, block, self.effort.crowd * self.width)
            labels = self._narrow(labels.pick(undominated(self._measures(labels), labels.kind)), block, self.width)
            waiting[block] = []
            self.by_block.append(labels)
            if len(labels) and len(options):
                for part in self._extend(labels, options):
                    for stop in np.unique(options.stop[part.option]):
                        waiting[stop].append(part.pick(options.stop[part.option] == stop))
        return LabelSet.join(waiting[-1]) if waiting[-1] else nothing

    def _narrow(self, labels: LabelSet, block: int, width: int) -> LabelSet:
        """The labels with the least bounds, if there are too many; none of them when this sweep is a proof."""
        if len(labels) <= width:
            return labels
        width = 0 if self.proof else width
        bounds = self.bounds(labels, block)
        order = np.argsort(_rank_in_group(bounds, labels.kind), kind="stable")  # leaves labels of each kind
        self.dropped = min(self.dropped, float(bounds[order[width:]].min()))
        return labels.pick(np.sort(order[:width]))

    def bounds(self, labels: LabelSet, block: int = -1) -> Floats:
        """The tightest bound of each label, as a value of the goal; the last cut is latency, which is no bound."""
        spent = [each.spent(self._kinds(labels.loads), labels.work, labels.arrivals) for each in self.cuts]
        goal = [paid + each.togo[block, labels.kind] - each.offset for paid, each in zip(spent, self.cuts, strict=True)]
        return np.asarray(np.max(goal[:-1], axis=0))

    def _kinds(self, loads: Floats) -> Floats:
        return self.columns.by_kind(loads, len(self.counts))

    def _measures(self, labels: LabelSet) -> Floats:
        late = [(labels.work + labels.arrivals * each)[:, None] for each in self.spacings_s]
        memory = labels.memory[:, np.isfinite(self.columns.capacity)]
        return np.concatenate([labels.loads, memory, *late], axis=1)

    def _extend(self, labels: LabelSet, options: Options) -> list[LabelSet]:
        """Every label extended by every option, as far as the cuts allow."""
        classes = options.class_of[labels.kind]
        extended = []
        for row in np.unique(classes):
            members = np.nonzero(classes == row)[0]
            step = max(1, self.effort.pairs // len(options))
            for at in range(0, len(members), step):
                extended += self._pairs(labels, members[at : at + step], options, row)
        return extended

    def _pairs(self, labels: LabelSet, rows: Ints, options: Options, source: int) -> list[LabelSet]:
        spent = [
            each.spent(self._kinds(labels.loads[rows]), labels.work[rows], labels.arrivals[rows]) for each in self.cuts
        ]
        ahead = [through(each, options, source) for each in self.cuts]
        limits = [limit + each.offset for limit, each in zip(self.limits, self.cuts, strict=True)]
        fits = np.ones(len(options), bool)
        for paid, rest, limit in zip(spent, ahead, limits, strict=True):
            fits &= (rest <= limit - paid.min()) & np.isfinite(rest)
        choice = np.nonzero(fits)[0]
        label, option = np.nonzero(spent[-2][:, None] + ahead[-2][choice] <= limits[-2])
        option = choice[option]
        if len(label) > (most := self.effort.crowd * self.width):
            score = spent[-2][label] + ahead[-2][option]
            order = np.argpartition(score, most)
            self.dropped = min(self.dropped, float(score[order[most]]) - self.cuts[-2].offset)
            kept = order[:most]
            label, option = label[kept], option[kept]
        for paid, rest, limit in zip(spent, ahead, limits, strict=True):
            keep = paid[label] + rest[option] <= limit
            label, option = label[keep], option[keep]
        return self._place(labels, rows[label], options, option, source)

    def _place(self, labels: LabelSet, label: Ints, options: Options, option: Ints, source: int) -> list[LabelSet]:
        """Place each pair on every column of its kind that may take it: columns in use, and the first unused one."""
        columns = self.columns.of(len(self.counts))
        result = []
        for turn in range(max(len(each) for each in columns)):
            target = np.array([each[turn] if turn < len(each) else -1 for each in columns])[options.kind[option]]
            free = labels.loads[label, target] == 0
            opened = free & (labels.loads[label, target - 1] == 0) if turn else np.zeros(len(label), bool)
            memory = labels.memory[label, target] + options.memory[option]
            keep = (target >= 0) & ~opened & (memory <= self.columns.capacity[target])
            if keep.any():
                result.append(self._grown(labels, label[keep], options, option[keep], source, target[keep]))
        return [part for part in result if len(part)]

    def _grown(
        self, labels: LabelSet, label: Ints, options: Options, option: Ints, source: int, column: Ints
    ) -> LabelSet:
        loads, memory, row = labels.loads[label], labels.memory[label], np.arange(len(label))
        loads[row, column] += options.load_s[source, option]
        memory[row, column] += options.memory[option]
        grown = LabelSet(
            loads, memory, labels.work[label] + options.work_s[source, option],
            labels.arrivals[label] + options.arrivals[option], options.kind[option],
            np.full(len(label), options.start), label, option, column,
        )  # fmt: skip
        return grown.pick(self._enough_devices(loads))

    def _enough_devices(self, loads: Floats) -> Bools:
        replicas = np.ceil(loads * self.least_goodput_per_s * (1 - SAME))
        devices = self._kinds(np.maximum(replicas, loads > 0))
        return np.asarray((devices <= self.counts).all(axis=1) & (devices @ self.prices <= self.most_dollars))


def _rank_in_group(values: Floats, group: Ints) -> Ints:
    """
    >>> _rank_in_group(np.array([3.0, 1.0, 2.0]), np.array([0, 0, 1])).tolist()
    [1, 0, 0]
    """
    order = np.lexsort((values, group))
    first = np.searchsorted(group[order], group[order])
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values)) - first
    return ranks


def undominated(points: Floats, group: Ints) -> Ints:
    """The rows that no other row of their group equals or undercuts in every column; of equal rows the least.

    Numbers that differ only from the eleventh digit on are equal. No float is negative, so bits sort like numbers.
    """
    if not len(points):
        return np.zeros(0, np.int64)
    coarse = np.ascontiguousarray(points).view(np.int64) >> SPARE_BITS
    groups = (np.nonzero(group == each)[0] for each in np.unique(group))
    rows_by_group = [rows[_front(coarse[rows], np.argsort(points[rows].sum(axis=1), kind="stable"))] for rows in groups]
    return np.sort(np.concatenate(rows_by_group))


def _front(points: Ints, order: Ints) -> Ints:
    """The front, in order of the points' sums: no point can dominate one with a smaller sum."""
    front = np.zeros(0, np.int64)
    for at in range(0, len(order), CHUNK):
        rows = order[at : at + CHUNK]
        rows = rows[~_beaten(points[front], points[rows], np.ones((len(front), len(rows)), bool))]
        earlier = np.tri(len(rows), k=-1, dtype=bool).T  # [i, j]: i comes before j
        front = np.concatenate([front, rows[~_beaten(points[rows], points[rows], earlier)]])
    return front


def _beaten(front: Ints, points: Ints, beats: Bools) -> Bools:
    """The points that one of the front equals or undercuts in every column, among the pairs that `beats` marks."""
    columns = points.shape[1]
    for column in range(columns):
        if columns - column >= FEW and SPARSE * np.count_nonzero(beats) < beats.size:
            break
        beats &= front[:, column, None] <= points[:, column]
    else:
        return np.asarray(beats.any(axis=0))
    winner, loser = np.nonzero(beats)
    for each in range(column, columns):
        keep = front[winner, each] <= points[loser, each]
        winner, loser = winner[keep], loser[keep]
    return np.bincount(loser, minlength=len(points)) > 0
