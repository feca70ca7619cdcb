"""Claim: the built-in demo model has a real exit curve, at no more than 1 % of accuracy lost.

What is shipped is run on digits that it has not seen. `make demo` makes it anew.
"""

from pathlib import Path

from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import demo_digits, held_out_digits
from isobatch.deployments.models import TorchModel, load
from isobatch.deployments.models.ramps import read_rules
from isobatch.profiles.promise import RULES

NOISES = (0.0, 0.2, 0.4, 0.8)
COUNT = 2000


def measure() -> dict[str, float]:
    folder = demo_directory()
    return {**_promised(folder), **_seen(load(folder))}


def _promised(folder: Path) -> dict[str, float]:
    """The figures in exits.json, which were measured on digits that neither training nor thresholds have seen."""
    rules = read_rules(folder / RULES)
    if rules.full_accuracy is None or rules.exit_accuracy is None or rules.mean_depth_share is None:
        raise ValueError(f"{folder / RULES}: a prepared model has measured figures")
    middle = len(rules.ramps) // 2
    return {
        "full_accuracy": rules.full_accuracy,
        "exit_accuracy": rules.exit_accuracy,
        "accuracy_lost": rules.full_accuracy - rules.exit_accuracy,
        "mean_depth_share": rules.mean_depth_share,
        "survival_middle": rules.ramps[middle].survival or 0.0,
    }


def _seen(model: TorchModel) -> dict[str, float]:
    """The accuracy on undistorted digits, and how noise moves the exits, both by the network as it is served."""
    images, labels = held_out_digits()
    full = model.run(model.encode(list(images)), model.num_blocks, ()).exits
    figures = {"held_out_digits_accuracy": float((full.labels == labels).mean())}
    for noise in NOISES:
        images, labels = demo_digits(COUNT, noise, seed=7)
        exits = model.run(model.encode(list(images)), model.num_blocks, model.ramp_blocks).exits
        figures[f"mean_depth_share_at_noise_{noise}"] = float((exits.blocks + 1).mean() / model.num_blocks)
    return figures
