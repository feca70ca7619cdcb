"""Cascades of given networks: what each says of a sample is computed once, then any of them are tried together.

A combination is one network or several, one behind the other, with the ramps that they were prepared with or without.
Temperatures, weights and the order in which thresholds are loosened come from some rows, what is told of it and what is
promised from others (deployments/prepare/measuring.py). Nothing may be lost against the last of all networks, alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deployments.exits import Policy
from deployments.folders import cache_directory
from deployments.models import checkpoint, load
from deployments.models.cascade import mixed
from deployments.models.cascade_loading import order_of
from deployments.models.ramps import RampKind, policy_at
from deployments.prepare.calibration import temperature
from deployments.prepare.features import features
from deployments.prepare.measuring import promised
from deployments.prepare.sample import Indices, Sample
from deployments.prepare.thresholds import replay
from profiles.evidence import Evidence
from profiles.exit_table import ExitTable, outcome
from profiles.losses import Metric
from profiles.promise import ExitPromise

WEIGHTS_TRIED = np.linspace(0.0, 1.0, 21)


@dataclass(frozen=True)
class Candidate:
    """A network, and what it says of every row, its labels numbered as the last candidate's. Nothing is calibrated.

    `ramps` are the logits of the ramps that it was prepared with, by block.
    """

    name: str
    folder: Path
    num_blocks: int
    head: Tensor
    ramps: Mapping[int, Tensor]
    kind: RampKind = "light"


@dataclass(frozen=True)
class Combination:
    """Some candidates one behind the other, by their numbers; with the ramps inside them, or without."""

    members: tuple[int, ...]
    exits: bool = False


@dataclass(frozen=True)
class Terms:
    """What is asked of every combination. `shape` and `test` are rows; `truth` is one-hot."""

    truth: Tensor
    shape: Indices
    test: Indices
    policy: str = "deployments.exits:entropy"
    metric: Metric = "accuracy"
    max_loss: float = 0.01
    confidence: float = 0.95


@dataclass(frozen=True)
class Tried:
    """A combination, calibrated. Its ramps stand after `blocks`: those inside its members, and heads at the edges."""

    members: tuple[Candidate, ...]
    exits: bool
    blocks: tuple[int, ...]
    temperatures: tuple[float, ...]  # of the ramps, and of the last head
    weights: tuple[float, ...]  # of the members
    evidence: Evidence
    alone: bool = False  # it is the last candidate by itself, which all are compared with

    @property
    def starts(self) -> list[int]:
        """The first block of every member, and last the number of all blocks."""
        return [0, *np.cumsum([member.num_blocks for member in self.members]).tolist()]

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(self.starts[1:-1])

    @property
    def ramps(self) -> range:
        return range(len(self.blocks))

    def hoped(self) -> Indices:
        """The thresholds that may be looked at for any number of combinations."""
        return self.evidence.hoped(self.ramps, self.evidence.shape.costs)

    def shown(self) -> Indices:
        """Those that pass the test. Ask it for one combination only: chance passes one of many."""
        return self.evidence.shown(self.ramps, self.evidence.test.costs)

    def survival(self, chosen: Indices, weights: Indices | None = None) -> tuple[float, ...]:
        """The share of the tested inputs that enter each block; with `weights`, each counts for so much."""
        left = np.array([*self.blocks, self.starts[-1] - 1])[self.evidence.test.places(chosen)]
        share = np.ones(len(left)) if weights is None else np.asarray(weights, float)
        return tuple(float(share[left >= block].sum() / share.sum()) for block in range(self.starts[-1]))

    def told(self, chosen: Indices) -> "Told":
        """What the tested inputs show of these thresholds."""
        table, places = self.evidence.test, self.evidence.test.places(chosen)
        return Told(
            accuracy=float(table.right[places, np.arange(table.num_inputs)].mean()),
            agreement=float(table.agrees[places, np.arange(table.num_inputs)].mean()),
            lost=float(outcome(table, chosen, self.evidence.metric).lost.mean),
            promise=promised(self.evidence, chosen),
        )

    def hopeful(self, chosen: Indices) -> bool:
        """Whether the rows that thresholds were made from show that no more is lost than is allowed."""
        losses = outcome(self.evidence.shape, chosen, self.evidence.metric).losses
        return self.alone or all(map(self.evidence.shows, losses))


@dataclass(frozen=True)
class Told:
    """`lost`: against the last candidate alone. `promise` is None where more may be lost than is allowed."""

    accuracy: float
    agreement: float
    lost: float
    promise: ExitPromise | None


def candidate(folder: Path, name: str, sample: Sample, labels: Sequence[str], device: str = "cpu") -> Candidate:
    """Run a network once over the sample; another time what it gave is read from the cache."""
    order = list(order_of(checkpoint.label_names(folder), labels, folder))
    model = load(folder, device)
    found = features(model, f"{checkpoint.fingerprint(folder)} float32", sample.values, cache_directory() / "features")
    with torch.inference_mode():
        ramps = {
            block: head.cpu()(torch.from_numpy(np.array(found.pooled[block])))[:, order]
            for block, head in model.ramps.heads.items()
        }
    head = torch.from_numpy(found.logits)[:, order]
    return Candidate(name, folder, model.num_blocks, head, ramps, model.ramps.rules.kind)


def all_combinations(candidates: Sequence[Candidate], most: int) -> Iterator[Combination]:
    """Every network alone, and up to `most` one behind the other; each also with the ramps that they have."""
    for count in range(1, most + 1):
        for members in combinations(range(len(candidates)), count):
            yield Combination(members)
            kinds = {candidates[number].kind for number in members if candidates[number].ramps}
            if len(kinds) == 1:  # ramps of one shape: the rules of a cascade know only one
                yield Combination(members, exits=True)


def tried(
    candidates: Sequence[Candidate], chosen: Combination, costs: Sequence[Sequence[float]], terms: Terms
) -> Tried:
    """Calibrate a combination. `costs` are what every candidate's blocks cost, in any one unit."""
    members = tuple(candidates[number] for number in chosen.members)
    spent = np.cumsum(np.concatenate([np.asarray(costs[number], float) for number in chosen.members]))
    blocks, temperatures, logits, weights = list[int](), list[float](), list[Tensor](), list[float]()
    believed, start, head_temperature = None, 0, 1.0
    alone = members == (candidates[-1],) and not chosen.exits
    for member in members:
        for block, given in sorted(member.ramps.items()) if chosen.exits else ():
            blocks.append(start + block)
            temperatures.append(temperature(given[terms.shape], terms.truth[terms.shape]))
            logits.append(given / temperatures[-1])
        head_temperature = temperature(member.head[terms.shape], terms.truth[terms.shape])
        own = (member.head / head_temperature).log_softmax(dim=1)
        weights.append(1.0 if believed is None else best_weight(own, believed, terms))
        believed = own if believed is None else _both(weights[-1], own, believed)
        start += member.num_blocks
        if member is not members[-1]:
            blocks.append(start - 1)
            temperatures.append(head_temperature)
            logits.append(believed)
    assert believed is not None, "This is a bug: a combination has members."
    shares = [float(spent[block] / spent[-1]) for block in blocks]
    ramps = torch.stack(logits) if logits else torch.zeros(0, *believed.shape)
    policy, reference = policy_at(terms.policy), None if alone else candidates[-1].head
    shape, test = (
        _table(policy, ramps, believed, shares, reference, terms, rows) for rows in (terms.shape, terms.test)
    )
    evidence = Evidence(shape, test, terms.metric, terms.max_loss, terms.confidence)
    calibrated = (*temperatures, head_temperature)
    return Tried(members, chosen.exits, tuple(blocks), calibrated, tuple(weights), evidence, alone)


def best_weight(own: Tensor, before: Tensor, terms: Terms) -> float:
    """The weight of a level's own answer under which the truth is most likely; 1, where that would cost accuracy."""
    rows = torch.from_numpy(terms.shape)
    truth = terms.truth[rows]

    def loss(weight: float) -> float:
        return -float((truth * _both(weight, own[rows], before[rows])).sum(dim=1).mean())

    best = min(WEIGHTS_TRIED.tolist(), key=lambda weight: (loss(weight), -weight))
    alone, together = (_right(believed, truth) for believed in (own[rows], _both(best, own[rows], before[rows])))
    return round(best, 4) if together >= alone else 1.0


def _table(
    policy: Policy,
    ramps: Tensor,
    head: Tensor,
    shares: list[float],
    reference: Tensor | None,
    terms: Terms,
    rows: Indices,
) -> ExitTable:
    known = None if reference is None else reference[rows]
    return replay(policy, ramps[:, rows], head[rows], terms.truth[rows], shares, reference=known)


def _both(weight: float, own: Tensor, before: Tensor) -> Tensor:
    return torch.from_numpy(mixed(weight, own.numpy(), before.numpy()))


def _right(believed: Tensor, truth: Tensor) -> float:
    return float(truth.gather(1, believed.argmax(dim=1, keepdim=True)).mean())
