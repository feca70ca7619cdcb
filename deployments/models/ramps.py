"""Ramps: small heads after blocks, at which inputs may leave. Their weights and rules are beside the checkpoint.

`ramps.safetensors` holds the weights; `exits.json` holds the rules by which inputs leave and the figures that were
measured, and may be edited.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Literal, cast

import torch
from pydantic import AfterValidator, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isobatch.deployments.exits import (
    USUAL,
    Decision,
    Policy,
    five_best,
    forgets,
    knows_best,
    memory_width,
    name_of,
    reach,
)
from isobatch.deployments.folders import hash_of_data
from isobatch.deployments.named import Dtype
from isobatch.deployments.tasks import CLASSIFICATION, Task
from isobatch.profiles.errors import UserError, read_model
from isobatch.profiles.losses import EntityF1, ListNdcg
from isobatch.profiles.promise import RULES, ExitPromise, FilePart, in_order

WEIGHTS = "ramps.safetensors"
FOR_LABELS = "entropy, confidence, margin, patience or voting"  # policies for networks that give labels

RampKind = Literal["light", "pooler", "bridge"]
RampDtype = Dtype


class RampRule(FilePart):
    """One ramp in exits.json."""

    block: int = Field(ge=0, description="The ramp stands after this block.")
    threshold: float = Field(description="In the policy's own unit.")
    temperature: float = Field(1.0, gt=0, description="Logits are divided by this before the policy sees them.")
    survival: float | None = Field(None, ge=0, le=1, description="Measured: the share of inputs that go on after it.")
    accuracy: float | None = Field(None, ge=0, le=1, description="Measured: of this ramp alone, over all inputs.")
    exit_accuracy: float | None = Field(None, ge=0, le=1, description="Measured: of the inputs that leave here.")
    ece_before: float | None = Field(None, ge=0, description="Measured: calibration error before its temperature.")
    ece_after: float | None = Field(None, ge=0, description="Measured: calibration error after its temperature.")


class ClassFigures(FilePart):
    """The effect of exits on the inputs of one class. `recall`: the share of these inputs that get this class."""

    label: int = Field(ge=0, description="The class, as the head numbers it.")
    inputs: int = Field(ge=0, description="The number of inputs of this class in the test.")
    full_recall: float = Field(ge=0, le=1, description="Of the full network.")
    recall: float = Field(ge=0, le=1, description="With exits.")
    full_f1: float = Field(ge=0, le=1, description="Of the full network: precision and recall in one.")
    f1: float = Field(ge=0, le=1, description="With exits.")
    lost: int = Field(ge=0, description="Inputs that only the full network answers right.")
    won: int = Field(ge=0, description="Inputs that are answered right with exits only.")


class ExitRules(FilePart):
    """exits.json: the rules by which inputs leave at ramps, and the figures measured when the ramps were made."""

    version: Literal[1, 2] = Field(2, description="Version 1 has no promise.")
    kind: RampKind = Field("light", description="The shape of every ramp.")
    policy: str = Field(
        "isobatch.deployments.exits:entropy", description="The policy that decides which inputs leave: an import path."
    )
    dtype: RampDtype = Field("float32", description="The precision of the network that the ramps were made for.")
    ramps: Annotated[tuple[RampRule, ...], AfterValidator(in_order)] = ()
    head_temperature: float = Field(1.0, gt=0, description="The temperature of the network's own head.")
    most_unsure: int = Field(
        0,
        ge=0,
        description="An input with an answer for each word or pixel leaves with up to this number of unsure ones.",
    )
    tolerance: float | None = Field(
        None, ge=0, description="Scores that differ, or points that are apart, by no more (in cells) count as the same."
    )
    full_accuracy: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Measured: of the full network; of scores, 1 - the mean error as a share of their range.",
    )
    exit_accuracy: float | None = Field(None, ge=0, le=1, description="Measured: with exits.")
    agreement: float | None = Field(None, ge=0, le=1, description="Measured: the share of the full network's answers.")
    mean_depth_share: float | None = Field(
        None, ge=0, le=1, description="Measured: the share of blocks that inputs run."
    )
    classes: tuple[ClassFigures, ...] = Field((), description="Measured: class by class.")
    entities: EntityF1 | None = Field(None, description="Measured: of whole entities, where words are labelled.")
    ndcg: ListNdcg | None = Field(None, description="Measured: of lists of documents.")
    promise: ExitPromise | None = Field(None, description="The most that other inputs lose; none: nothing is promised.")
    notes: Mapping[str, str | int | float] = Field(default_factory=dict, description="How the ramps were made.")

    @property
    def of_scores(self) -> bool:
        """Whether the network has one output, a score."""
        return self.tolerance is not None and self.kind != "bridge"


@dataclass(frozen=True)
class Ramps:
    """The ramps of one network, ready to run."""

    rules: ExitRules = field(default_factory=ExitRules)
    heads: Mapping[int, nn.Module] = field(default_factory=dict)
    policy: Policy = field(init=False)
    _rule_of: Mapping[int, RampRule] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", policy_at(self.rules.policy))
        object.__setattr__(self, "_rule_of", {rule.block: rule for rule in self.rules.ramps})

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(sorted(self._rule_of))

    @property
    def knows_best(self) -> bool:
        """Whether inputs also leave because they are not among the best that their request wants."""
        return knows_best(self.policy)

    def idle(self, num_labels: int) -> list[str]:
        """A sentence about each threshold that never or always fires, which is allowed but rarely intended."""
        fires = {
            rule.block: reach(self.policy, rule.threshold, num_labels, len(self.blocks)) for rule in self.rules.ramps
        }
        return [f"the ramp after block {block} {often} fires" for block, often in fires.items() if often != USUAL]

    def memory_width(self, num_labels: int) -> int:
        return memory_width(self.policy, num_labels) if self._rule_of else 0

    def observed(self, active: Collection[int]) -> frozenset[int]:
        """The ramps whose logits must be computed.

        A policy that remembers ramps needs every ramp before an active one: otherwise switching a ramp off would change
        the decisions at the others.
        """
        if not active or forgets(self.policy):
            return frozenset(active)
        return frozenset(block for block in self.blocks if block <= max(active))

    def logits(self, block: int, pooled: Tensor) -> Tensor:
        """Calibrated logits, in float32 for a network of any precision, as the policy decides by them."""
        logits: Tensor = self.heads[block](pooled.float())
        return logits / self._rule_of[block].temperature

    def decide(self, block: int, logits: Tensor, memory: Tensor, threshold: float | None = None) -> Decision:
        """The policy's decision. `threshold` replaces the ramp's own threshold."""
        return self.policy(logits, self._rule_of[block].threshold if threshold is None else threshold, memory)


def make_head(kind: RampKind, width: int, num_labels: int) -> nn.Module:
    """`light` is one linear layer on the pooled state; `pooler` is DeeBERT's: dense, tanh, linear."""
    if kind == "light":
        return nn.Linear(width, num_labels)
    return nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, num_labels))


def policy_at(path: str) -> Policy:
    """The policy at an import path. It is called once with two inputs and two labels, so that errors show early.

    >>> policy_at("isobatch.deployments.exits:margin").__name__
    'margin'
    """
    try:
        if not path.partition(":")[2]:  # resolve_name would give the module itself
            raise ValueError("it names no function")
        policy = cast(Policy, resolve_name(path))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"policy {path!r} cannot be imported ({error}): use {FOR_LABELS}, or write it as module:function"
        ) from error
    try:
        decision: object = policy(torch.zeros(2, 2), 0.5, torch.zeros(2, memory_width(policy, num_labels=2)))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"policy {path!r} failed when tried on two inputs: {reason}") from error
    if not isinstance(decision, Decision):
        raise UserError(
            f"policy {path!r} must return an isobatch.deployments.exits.Decision, not {type(decision).__name__}"
        )
    return policy


def check_forgets(policy: Policy, source: object, reason: str = "but this network answers its words or labels") -> None:
    """Raise UserError for a policy with memory, which cannot decide on parts of an input. `source`: its place."""
    if not forgets(policy):
        raise UserError(
            f"{source}: policy {name_of(policy)} remembers earlier ramps of an input, {reason}: "
            "use entropy, confidence, margin, or one of your own that remembers nothing"
        )


def check_answers(policy: Policy, where: str | Path, task: Task = CLASSIFICATION) -> None:
    """Raise UserError unless the policy fits what ramps give: the logits of all labels, the two numbers from which one
    score follows (`near`), or heat maps (`five_best`)."""
    answer = policy(torch.zeros(1, 2), 0.5, torch.zeros(1, memory_width(policy, num_labels=2))).answer
    gives_score, problem = answer.shape == (1, 1), ""
    if task.by_score and not gives_score:
        problem = "chooses among labels, but this network gives a score: use near"
    elif gives_score and not task.by_score:
        problem = f"gives a score, but this network gives labels: use {FOR_LABELS}"
    elif policy is five_best and not task.map_width:
        problem = f"reads heat maps, which only networks that find points have: use {FOR_LABELS}"
    if problem:
        raise UserError(f"{where}: policy {name_of(policy)} {problem}")


def save_ramps(folder: Path, rules: ExitRules, heads: Mapping[int, nn.Module]) -> None:
    """The rules are written last: a folder that has them has the weights too."""
    tensors = {f"{block}.{name}": value for block, head in heads.items() for name, value in head.state_dict().items()}
    save_file(tensors, folder / WEIGHTS)
    rules.write(folder / RULES)


def read_rules(path: Path) -> ExitRules:
    return read_model(path, ExitRules)


def made_from(folder: Path, data: Path) -> Mapping[str, str | int | float]:
    """How the ramps of this checkpoint were made, if from the rows of this file or directory; else empty."""
    notes = read_rules(folder / RULES).notes if (folder / RULES).is_file() else {}
    return notes if notes.get("data_hash") and notes["data_hash"] == hash_of_data(data) else {}


def read_ramps(
    rules_path: Path,
    weights_path: Path,
    pooled_widths: Collection[int],
    num_labels: int,
    device: torch.device | str = "cpu",
    rules: ExitRules | None = None,
    bridge: Callable[[int], nn.Module] | None = None,
) -> Ramps:
    """The ramps beside a checkpoint whose blocks are pooled to these widths. `rules`: a part of the file's, where it is
    for several networks. `bridge` makes the bridge after a block, of a network that has bridges."""
    widths, rules = list(pooled_widths), rules or read_rules(rules_path)
    try:
        weights = load_file(weights_path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights_path}: cannot be read: {error}") from error
    heads = {}
    for rule in rules.ramps:
        if rule.block >= len(widths) - 1:
            raise UserError(f"{rules_path}: no ramp can stand after block {rule.block} of {len(widths)} blocks")
        try:
            head, prefix = _empty_head(rules.kind, rule.block, widths[rule.block], num_labels, bridge), f"{rule.block}."
            own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
            head.load_state_dict(own)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{weights_path}: the ramp after block {rule.block} does not fit: {reason}") from error
        heads[rule.block] = head.eval().to(device)
    return Ramps(rules, heads)


def _empty_head(
    kind: RampKind, block: int, width: int, num_labels: int, bridge: Callable[[int], nn.Module] | None
) -> nn.Module:
    if (kind == "bridge") != (bridge is not None):
        raise RuntimeError(f"ramps of kind {kind!r} are not for this network")
    return bridge(block) if bridge else make_head(kind, width, num_labels)
