"""The promise about a network's exits, as stored in exits.json beside the checkpoint."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from isobatch.profiles.errors import UserError, read_text
from isobatch.profiles.losses import APPROXIMATE, NAMES, NDCG, Loss, Metric

RULES = "exits.json"
NOTHING = "nothing is promised about losses by exits"


class FilePart(BaseModel):
    """A part of a file that a user may edit: a misspelt field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def write(self, path: Path) -> None:
        """Write a file that holds only this part."""
        path.write_text(self.model_dump_json(indent=2) + "\n")


class ExitPromise(FilePart):
    """Other inputs of the same kind lose no more than `max_loss`, with probability `confidence`."""

    metric: Metric = Field(description="The metric in which inputs may lose.")
    max_loss: float = Field(ge=0, lt=1, description="The most that other inputs lose, as a share of the metric.")
    confidence: float = Field(gt=0, lt=1, description="The confidence of that; approximate for a score of all inputs.")
    rows: int = Field(ge=1, description="Inputs of the test, which were used for nothing else.")
    counted: int | None = Field(
        None,
        ge=1,
        description="The inputs that decide what can be shown: where classes count, those of the rarest class; for "
        "micro-F1, as many as weigh alike; for NDCG, the lists.",
    )
    lost: float = Field(
        description="Measured: the loss of these inputs; where classes count, of the class that lost most."
    )
    bound: float = Field(description="An upper bound on the loss of other inputs, from this test: at most max_loss.")

    @property
    def deciding(self) -> int:
        return self.counted or self.rows

    def __str__(self) -> str:
        """
        >>> print(ExitPromise(metric="accuracy", max_loss=0.01, confidence=0.95, rows=4000, lost=0.004, bound=0.009))
        at most 1 % of accuracy lost, 95 % sure (4,000 inputs lost 0.40 %: a bound of 0.90 %)
        >>> print(ExitPromise(metric="mcc", max_loss=0.01, confidence=0.95, rows=4000, lost=-0.02, bound=0.0))
        at most 1 % of MCC lost, about 95 % sure (4,000 inputs gained 2.00 %: a bound of 0.00 %)
        """
        moved = f"lost {100 * self.lost:.2f}" if self.lost >= 0 else f"gained {-100 * self.lost:.2f}"
        inputs = f"{self.rows:,} inputs" + (f" in {self.counted:,} lists" if self.metric == NDCG else "")
        measured = f"{inputs} {moved} %: a bound of {100 * self.bound:.2f} %"
        sure = f"{'about ' if self.metric in APPROXIMATE else ''}{100 * self.confidence:.4g} % sure"
        return f"at most {100 * self.max_loss:.4g} % of {NAMES[self.metric]} lost, {sure} ({measured})"


def in_order(ramps: tuple[Any, ...]) -> tuple[Any, ...]:
    """The ramps of an exits.json; raise ValueError unless their blocks ascend."""
    blocks = [ramp.block for ramp in ramps]
    if blocks != sorted(set(blocks)):
        raise ValueError(f"ramps must stand after ascending blocks, each once, got {blocks}")
    return ramps


class _Ramp(BaseModel):
    block: int
    threshold: float


class _Rules(BaseModel):
    promise: ExitPromise | None = None
    agreement: float | None = None
    tolerance: float | None = None
    ramps: tuple[_Ramp, ...] = ()


def _rules_in(folder: Path) -> _Rules:
    """The rules of the network in this directory; empty if it has no such file."""
    with suppress(UserError, ValueError):
        return _Rules.model_validate_json(read_text(folder / RULES))
    return _Rules()


def agreement_in(folder: Path) -> float | None:
    """The share of answers that should equal the full network's: the promised one, or else the measured one.

    The measured share may be luck, so the lower end of its 95 % interval is used. None: nothing is known.
    """
    rules = _rules_in(folder)
    if rules.promise and rules.promise.metric == "agreement":
        return 1 - rules.promise.max_loss
    if rules.promise and rules.agreement is not None:
        from isobatch.profiles.confidence import bound  # imports scipy, which would take each front 0.2 s

        off = 1 - rules.agreement
        return 1 - bound(Loss(off, off, rules.promise.rows), 0.95, "agreement")
    return None


def promise_in(folder: Path) -> ExitPromise | None:
    """The promise of the network in this directory; None if it makes none, or has no such file."""
    return _rules_in(folder).promise


def tolerance_in(folder: Path) -> float:
    """The largest distance of two scores or points that count as the same; 0 for a network with labels."""
    return _rules_in(folder).tolerance or 0.0


def thresholds_in(folder: Path) -> dict[int, float]:
    """The thresholds of the network in this directory, by the block before the ramp."""
    return {ramp.block: ramp.threshold for ramp in _rules_in(folder).ramps}
