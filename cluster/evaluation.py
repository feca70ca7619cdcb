"""How right a network is in full and with exits, on inputs that it has not seen."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.table import Table

from deployments.models.predict import Predicted
from deployments.models.ramps import ClassFigures
from deployments.prepare.classes import by_class
from profiles.errors import UserError

STEADY = 1.96  # standard errors of an interval that holds 95 %
AT_ONCE = 32
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Interval:
    """A mean, and how far from it the truth may lie (95 %)."""

    mean: float
    within: float

    def __str__(self) -> str:
        """
        >>> str(Interval(0.123, 0.0149))
        '12.3 ± 1.5 %'
        """
        return f"{100 * self.mean:.1f} ± {100 * self.within:.1f} %"


@dataclass(frozen=True)
class Evaluation:
    """`lost` is what exits cost, input by input: its interval is narrower than those of both accuracies."""

    inputs: int
    agreement: Interval
    depth: Interval  # the share of the blocks that an input runs
    full_accuracy: Interval | None = None  # None: the inputs have no labels
    accuracy: Interval | None = None
    lost: Interval | None = None
    classes: tuple[ClassFigures, ...] = ()

    def as_json(self) -> str:
        classes = [each.model_dump() for each in self.classes]
        return json.dumps({"schema_version": 1, **asdict(self), "classes": classes}, indent=2)


def evaluated(
    full: Sequence[Predicted], exits: Sequence[Predicted], truth: NDArray[np.int64] | None, num_blocks: int
) -> Evaluation:
    """`full` and `exits` are the answers without exits and with them, to the same inputs."""
    said, early = (np.array([each.label for each in answers]) for answers in (full, exits))
    depth = np.array([(each.exit_block + 1) / num_blocks for each in exits])
    agreement = _share(said == early)
    if truth is None:
        return Evaluation(len(exits), agreement, _mean(depth))
    lost = (said == truth).astype(float) - (early == truth)
    return Evaluation(
        len(exits), agreement, _mean(depth), _share(said == truth), _share(early == truth), _mean(lost),
        by_class(truth, said, early),
    )  # fmt: skip


def _share(right: NDArray[np.bool_]) -> Interval:
    """With two imagined inputs of each kind in its interval, so that it says something where all are alike."""
    count, shrunk = len(right), (right.sum() + 2) / (len(right) + 4)
    return Interval(float(right.mean()), float(STEADY * np.sqrt(shrunk * (1 - shrunk) / (count + 4))))


def _mean(values: NDArray[np.float64]) -> Interval:
    return Interval(float(values.mean()), float(STEADY * values.std() / np.sqrt(len(values))))


def table(found: Evaluation) -> Table:
    rows = Table("what", "measured (95 %)", title=f"{found.inputs:,} inputs", box=SIMPLE, title_justify="left")
    figures = {
        "accuracy in full": found.full_accuracy,
        "accuracy with exits": found.accuracy,
        "lost by exits": found.lost,
        "the full network's answer": found.agreement,
        "blocks run per input": found.depth,
    }
    for name, figure in figures.items():
        if figure:
            rows.add_row(name, str(figure))
    return rows


def served(url: str, values: Sequence[Any]) -> list[Predicted]:
    """What a server answers to these inputs."""
    listed = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    return [
        Predicted(each["label"], each["name"], each["score"], each["exit_block"])
        for start in range(0, len(listed), AT_ONCE)
        for each in _asked(url, listed[start : start + AT_ONCE])
    ]


def _asked(url: str, inputs: Sequence[Any]) -> Any:
    body = json.dumps({"inputs": inputs}).encode()
    headers = {"Content-Type": "application/json", "X-Deadline-Ms": str(1e3 * PATIENCE_S)}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=2 * PATIENCE_S) as reply:
            return json.load(reply)["outputs"]
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace")
        raise UserError(f"{url} answers with status {error.code}: {said}") from error
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{url} does not answer as isobatch does: {error}") from error
