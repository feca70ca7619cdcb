"""Combines given networks to cascades. Each network answers a sample once; then any combination is calibrated from it.

A combination is one network or several in a row, with or without the ramps that they were prepared with. Temperatures,
weights and the order in which thresholds are loosened come from some rows of the sample; figures and promises come from
others (deployments/prepare/measuring.py). Losses are measured against the last candidate alone.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from isobatch.deployments.folders import cache_directory, replacing
from isobatch.deployments.models import checkpoint, load
from isobatch.deployments.models.cascade import mixed
from isobatch.deployments.models.cascade_loading import order_of
from isobatch.deployments.models.levels import CASCADE, CascadeRules, LevelRule
from isobatch.deployments.models.ramps import WEIGHTS, ExitRules, RampKind, RampRule, policy_at
from isobatch.deployments.prepare.features import features
from isobatch.deployments.prepare.measuring import proven_promise, retuned
from isobatch.deployments.prepare.pipeline import check_free
from isobatch.deployments.prepare.sample import Indices, Sample
from isobatch.deployments.prepare.thresholds import replay, temperature
from isobatch.profiles.evidence import Evidence
from isobatch.profiles.exit_table import outcome
from isobatch.profiles.losses import Metric
from isobatch.profiles.promise import RULES, ExitPromise

TRIED_WEIGHTS = np.linspace(0.0, 1.0, 21)  # of a level's own answer


@dataclass(frozen=True)
class Candidate:
    """A network with its logits for every row, before calibration. Labels are numbered as the last candidate's.

    `ramps` holds the logits of the ramps that the network was prepared with, by block.
    """

    name: str
    folder: Path
    num_blocks: int
    head: Tensor
    ramps: Mapping[int, Tensor]
    kind: RampKind = "light"


@dataclass(frozen=True)
class Combination:
    """Some candidates in a row, by their numbers, with or without the ramps inside them."""

    members: tuple[int, ...]
    exits: bool = False


@dataclass(frozen=True)
class ComparisonTerms:
    """The terms under which combinations are compared.

    Thresholds are made from the rows `shape` and tested on the rows `test`; `truth` is one-hot.
    """

    truth: Tensor
    shape: Indices
    test: Indices
    policy: str = "isobatch.deployments.exits:entropy"
    metric: Metric = "accuracy"
    max_loss: float = 0.01
    confidence: float = 0.95


@dataclass(frozen=True)
class CalibratedCombination:
    """A combination after calibration. Its ramps stand after `blocks`: ramps inside members, and heads at the edges."""

    members: tuple[Candidate, ...]
    exits: bool
    blocks: tuple[int, ...]
    temperatures: tuple[float, ...]  # of the ramps, and of the last head
    weights: tuple[float, ...]  # of the members' own answers
    evidence: Evidence
    alone: bool = False  # this is the last candidate alone, with which all are compared

    @property
    def starts(self) -> list[int]:
        """The first block of every member, followed by the number of all blocks."""
        return [0, *np.cumsum([member.num_blocks for member in self.members]).tolist()]

    @property
    def edges(self) -> tuple[int, ...]:
        return tuple(self.starts[1:-1])

    @property
    def ramps(self) -> range:
        return range(len(self.blocks))

    def hoped(self) -> Indices:
        """The best thresholds by the `shape` rows, which may be computed for any number of combinations."""
        return self.evidence.likely_candidates(self.ramps, self.evidence.shape.costs)

    def shown(self) -> Indices:
        """The thresholds that pass the test. Call it for one combination only: of many, one passes by chance."""
        return self.evidence.proven_candidates(self.ramps, self.evidence.test.costs)

    def survival(self, chosen: Indices, weights: Indices | None = None) -> tuple[float, ...]:
        """The share of the tested inputs that enter each block; `weights` is the weight of each input."""
        left = np.array([*self.blocks, self.starts[-1] - 1])[self.evidence.test.places(chosen)]
        share = np.ones(len(left)) if weights is None else np.asarray(weights, float)
        return tuple(float(share[left >= block].sum() / share.sum()) for block in range(self.starts[-1]))

    def figures(self, chosen: Indices) -> "CombinationFigures":
        """The figures of these thresholds, measured on the tested inputs."""
        table, places = self.evidence.test, self.evidence.test.places(chosen)
        return CombinationFigures(
            accuracy=float(table.right[places, np.arange(table.num_inputs)].mean()),
            agreement=float(table.agrees[places, np.arange(table.num_inputs)].mean()),
            lost=float(outcome(table, chosen, self.evidence.metric).lost.mean),
            promise=proven_promise(self.evidence, chosen),
        )

    def hopeful(self, chosen: Indices) -> bool:
        """Whether the rows that thresholds were made from show that the loss is within the allowed one."""
        losses = outcome(self.evidence.shape, chosen, self.evidence.metric).losses
        return self.alone or all(map(self.evidence.shows, losses))


@dataclass(frozen=True)
class CombinationFigures:
    """Measured figures of a combination with some thresholds.

    `lost` is against the last candidate alone. `promise` is None if more than the allowed loss may be lost.
    """

    accuracy: float
    agreement: float
    lost: float
    promise: ExitPromise | None


def candidate(folder: Path, name: str, sample: Sample, labels: Sequence[str], device: str = "cpu") -> Candidate:
    """Run a network over the sample. A second run over the same sample reads the cache."""
    order = list(order_of(checkpoint.label_names(folder), labels, folder))
    model = load(folder, device)
    cached = features(model, f"{checkpoint.fingerprint(folder)} float32", sample.values, cache_directory() / "features")
    with torch.inference_mode():
        ramps = {
            block: head.cpu()(torch.from_numpy(np.array(cached.pooled[block])))[:, order]
            for block, head in model.ramps.heads.items()
        }
    head = torch.from_numpy(cached.logits)[:, order]
    return Candidate(name, folder, model.num_blocks, head, ramps, model.ramps.rules.kind)


def all_combinations(candidates: Sequence[Candidate], most: int) -> Iterator[Combination]:
    """Every network alone, and up to `most` in a row; each combination also with the ramps of its members."""
    for count in range(1, most + 1):
        for members in combinations(range(len(candidates)), count):
            yield Combination(members)
            kinds = {candidates[number].kind for number in members if candidates[number].ramps}
            if len(kinds) == 1:  # all ramps have one shape, as the rules of a cascade allow only one
                yield Combination(members, exits=True)


def calibrated(
    candidates: Sequence[Candidate], chosen: Combination, costs: Sequence[Sequence[float]], terms: ComparisonTerms
) -> CalibratedCombination:
    """Calibrate a combination. `costs` holds the cost of each block of each candidate, all in the same unit."""
    members = tuple(candidates[number] for number in chosen.members)
    total_costs = np.cumsum(np.concatenate([np.asarray(costs[number], float) for number in chosen.members]))
    blocks, temperatures, logits, weights = list[int](), list[float](), list[Tensor](), list[float]()
    answer, start, head_temperature = None, 0, 1.0
    alone = members == (candidates[-1],) and not chosen.exits
    for member in members:
        for block, given in sorted(member.ramps.items()) if chosen.exits else ():
            blocks.append(start + block)
            temperatures.append(temperature(given[terms.shape], terms.truth[terms.shape]))
            logits.append(given / temperatures[-1])
        head_temperature = temperature(member.head[terms.shape], terms.truth[terms.shape])
        own = (member.head / head_temperature).log_softmax(dim=1)
        weights.append(1.0 if answer is None else best_weight(own, answer, terms))
        answer = own if answer is None else _mixed(weights[-1], own, answer)
        start += member.num_blocks
        if member is not members[-1]:
            blocks.append(start - 1)
            temperatures.append(head_temperature)
            logits.append(answer)
    assert answer is not None, "This is a bug: a combination has members."
    shares = [float(total_costs[block] / total_costs[-1]) for block in blocks]
    ramps = torch.stack(logits) if logits else torch.zeros(0, *answer.shape)
    policy, reference = policy_at(terms.policy), None if alone else candidates[-1].head
    tables = []
    for rows in (terms.shape, terms.test):
        known = None if reference is None else reference[rows]
        tables.append(replay(policy, ramps[:, rows], answer[rows], terms.truth[rows], shares, reference=known))
    evidence = Evidence(tables[0], tables[1], terms.metric, terms.max_loss, terms.confidence)
    temperatures.append(head_temperature)
    return CalibratedCombination(
        members, chosen.exits, tuple(blocks), tuple(temperatures), tuple(weights), evidence, alone
    )


def best_weight(own: Tensor, before: Tensor, terms: ComparisonTerms) -> float:
    """The weight of a level's own answer under which the truth is most likely; 1 if that weight costs accuracy."""
    rows = torch.from_numpy(terms.shape)
    truth = terms.truth[rows]

    def loss(weight: float) -> float:
        return -float((truth * _mixed(weight, own[rows], before[rows])).sum(dim=1).mean())

    best = min(TRIED_WEIGHTS.tolist(), key=lambda weight: (loss(weight), -weight))
    alone, together = (_right(answer, truth) for answer in (own[rows], _mixed(best, own[rows], before[rows])))
    return round(best, 4) if together >= alone else 1.0


def _mixed(weight: float, own: Tensor, before: Tensor) -> Tensor:
    return torch.from_numpy(mixed(weight, own.numpy(), before.numpy()))


def _right(answer: Tensor, truth: Tensor) -> float:
    return float(truth.gather(1, answer.argmax(dim=1, keepdim=True)).mean())


Notes = Mapping[str, str | int | float]


def write_cascade(
    out: Path, combination: CalibratedCombination, chosen: Indices, policy: str, notes: Notes, force: bool = False
) -> ExitRules:
    """Write `out`: every member's checkpoint, the rules of all ramps, and the levels with their weights."""
    check_free(out, force)
    rules = rules_of(combination, chosen, policy, notes)
    with replacing(out) as draft:
        if len(combination.members) == 1:
            _copy(combination.members[0], draft, combination.exits)
        else:
            levels = tuple(
                LevelRule(folder=f"level-{number}", model=member.name, blocks=member.num_blocks, weight=weight)
                for number, (member, weight) in enumerate(zip(combination.members, combination.weights, strict=True))
            )
            for level, member in zip(levels, combination.members, strict=True):
                (draft / level.folder).mkdir()
                _copy(member, draft / level.folder, combination.exits)
            CascadeRules(levels=levels, notes=dict(notes)).write(draft / CASCADE)
        rules.write(draft / RULES)
    return rules


def rules_of(combination: CalibratedCombination, chosen: Indices, policy: str, notes: Notes) -> ExitRules:
    """The content of exits.json: a rule for every ramp, including the ramps at edges."""
    table, temperatures = combination.evidence.test, combination.temperatures
    ramps = tuple(
        RampRule(block=block, threshold=0.0, temperature=temperatures[ramp], accuracy=float(table.right[ramp].mean()))
        for ramp, block in enumerate(combination.blocks)
    )
    kind = next((member.kind for member in combination.members if member.ramps), "light")
    untuned = ExitRules(kind=kind, policy=policy, ramps=ramps, head_temperature=temperatures[-1], notes=dict(notes))
    places = table.places(chosen)
    depths = np.array([*combination.blocks, combination.starts[-1] - 1])[places] + 1
    # Audits compare with the answer at the end of these networks, not with that of the last candidate alone.
    agrees = table.labels[places, np.arange(table.num_inputs)] == table.labels[-1]
    measured = {
        "agreement": float(agrees.mean()),
        "full_accuracy": float(table.full_right.mean()),
        "mean_depth_share": float(depths.mean() / combination.starts[-1]),
    }
    return retuned(untuned, combination.evidence, chosen).model_copy(update=measured)


def _copy(member: Candidate, to: Path, exits: bool) -> None:
    checkpoint.copy(member.folder, to)
    if exits and member.ramps:
        shutil.copyfile(member.folder / WEIGHTS, to / WEIGHTS)
    else:
        save_file({}, to / WEIGHTS)
