"""From features to ramps that are trained, calibrated, given thresholds, and measured on inputs kept for that alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from deployments.models.ramps import ExitRules, RampDtype, RampKind, RampRule, policy_at
from deployments.prepare.calibration import calibration_error, temperature
from deployments.prepare.features import Features, Floats
from deployments.prepare.sample import Indices, Sample
from deployments.prepare.thresholds import Replay, Tradeoff, replay, search, tradeoff
from deployments.prepare.training import answers, train


@dataclass(frozen=True)
class PrepareOptions:
    """What a user may choose. `margin` is how many standard errors the measured loss must keep from what is allowed.

    `threshold`: this one at every ramp, instead of those that a search finds for what may be lost.
    """

    policy: str = "deployments.exits:entropy"
    ramp: RampKind = "light"
    dtype: RampDtype = "float32"
    max_accuracy_loss: float = 0.01
    margin: float = 2.0
    seed: int = 0
    threshold: float | None = None


@dataclass(frozen=True)
class Seen:
    """The logits of ramps and head for some inputs, calibrated or not yet, and the true labels (one-hot)."""

    ramps: Tensor
    head: Tensor
    truth: Tensor

    def temperatures(self) -> list[float]:
        """The temperature that calibrates each ramp, and the head's last."""
        return [temperature(logits, self.truth) for logits in self.heads()]

    def calibrated(self, temperatures: Sequence[float]) -> "Seen":
        """The same, calibrated by one temperature a ramp and the head's last."""
        ramps = [logits / value for logits, value in zip(self.ramps, temperatures, strict=False)]
        return Seen(torch.stack(ramps), self.head / temperatures[-1], self.truth)

    def heads(self) -> list[Tensor]:
        return [*self.ramps, self.head]


def make_ramps(found: Features, sample: Sample, options: PrepareOptions) -> tuple[ExitRules, Mapping[int, nn.Module]]:
    """Ramps after every block but the last, and the rules by which inputs leave at them."""
    wanted, truth = targets_of(found, sample)
    heads = train(found.pooled, wanted, sample.parts.train, options.ramp, options.seed)
    calibrate = look(heads, found, truth, sample.parts.calibrate)
    temperatures = calibrate.temperatures()
    report = look(heads, found, truth, sample.parts.report)
    calibrated = report.calibrated(temperatures)
    chosen, reached = _choose(calibrate.calibrated(temperatures), calibrated, options)
    errors = [
        (calibration_error(before, report.truth), calibration_error(after, report.truth))
        for before, after in zip(report.heads(), calibrated.heads(), strict=True)
    ]
    return _rules(options, temperatures, chosen, reached, errors), dict(enumerate(heads))


def targets_of(found: Features, sample: Sample) -> tuple[Floats, Tensor]:
    """What ramps are trained towards, and what counts as right: the labels, or what the full network says."""
    num_labels = found.logits.shape[1]
    labels = found.logits.argmax(axis=1) if sample.labels is None else sample.labels
    truth = np.eye(num_labels, dtype=np.float32)[labels]
    wanted = torch.from_numpy(found.logits).softmax(dim=1).numpy() if sample.labels is None else truth
    return wanted, torch.from_numpy(truth)


def look(heads: list[nn.Module], found: Features, truth: Tensor, rows: Indices) -> Seen:
    return Seen(answers(heads, found.pooled, rows), torch.from_numpy(found.logits[rows]), truth[rows])


@dataclass(frozen=True)
class Reached:
    """What thresholds do to the inputs that are kept for the report."""

    table: Replay
    tradeoff: Tradeoff


def _choose(calibrate: Seen, report: Seen, options: PrepareOptions) -> tuple[list[float], Reached]:
    policy = policy_at(options.policy)
    num_ramps = len(calibrate.ramps)
    depths = [(block + 1) / (num_ramps + 1) for block in range(num_ramps)]
    table_there = replay(policy, report.ramps, report.head, report.truth, depths, options.threshold)
    if options.threshold is not None:
        everywhere = np.zeros(num_ramps, np.int64)
        return [options.threshold] * num_ramps, Reached(table_there, tradeoff(table_there, everywhere))
    table = replay(policy, calibrate.ramps, calibrate.head, calibrate.truth, depths)
    chosen = search(table, options.max_accuracy_loss, options.margin)
    return table.candidates[chosen].tolist(), Reached(table_there, tradeoff(table_there, chosen))


def _rules(
    options: PrepareOptions,
    temperatures: list[float],
    thresholds: list[float],
    reached: Reached,
    errors: list[tuple[float, float]],
) -> ExitRules:
    right, places = reached.table.right, reached.tradeoff.places
    ramps = tuple(
        RampRule(
            block=ramp,
            threshold=threshold,
            temperature=temperatures[ramp],
            survival=float((places > ramp).mean()),
            accuracy=float(right[ramp].mean()),
            exit_accuracy=float(right[ramp][places == ramp].mean()) if (places == ramp).any() else None,
            ece_before=errors[ramp][0],
            ece_after=errors[ramp][1],
        )
        for ramp, threshold in enumerate(thresholds)
    )
    return ExitRules(
        kind=options.ramp,
        policy=options.policy,
        dtype=options.dtype,
        ramps=ramps,
        head_temperature=temperatures[-1],
        full_accuracy=float(right[-1].mean()),
        exit_accuracy=float(right[places, np.arange(len(places))].mean()),
        mean_depth_share=reached.tradeoff.depth,
    )
