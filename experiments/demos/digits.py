"""Makes the built-in demo that is shipped with the package: `make demo`, several minutes.

Networks trained by this recipe differ: the seed, and on another processor the last bits of the arithmetic, decide where
inputs leave and what they lose. So the threshold is fixed, and several seeds are tried in turn: the first network that
passes quality.py by a margin is shipped. A demo made on another machine is another network of the same quality.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import move, rmtree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from experiments.demos.quality import quality_of
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import (
    NOISE,
    NUM_CALIBRATE,
    NUM_TRAIN,
    PIXEL_MAX,
    Images,
    Labels,
    demo_digits,
    digits,
    distort,
)
from isobatch.deployments.exits import entropy
from isobatch.deployments.models import load
from isobatch.deployments.models.backends import make_ready, on_backend
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.models.loading import quietly
from isobatch.deployments.models.ramps import RampDtype, read_rules
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.named import INT8
from isobatch.deployments.prepare.measuring import PrepareOptions, RampLogits, retuned
from isobatch.deployments.prepare.pipeline import PICTURE, prepare
from isobatch.deployments.prepare.report import draw_exits
from isobatch.deployments.prepare.sample import Parts, Sample
from isobatch.deployments.prepare.thresholds import replay
from isobatch.deployments.progress import show
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import ExitTable
from isobatch.profiles.model import SplitModel
from isobatch.profiles.promise import RULES

SEEDS = 8  # networks that are trained, at most, before giving up
SHIPPED: tuple[RampDtype, ...] = ("float32", "int8")  # the precisions of the demos that are shipped
# One threshold for all ramps. Thresholds that a search picked on 400 digits and their copies, which are dependent, were
# too optimistic: one of two networks lost 0.8 % of the accuracy where 0.5 % was allowed, and 11 % of the inputs entered
# its second half. With this threshold both lose less than 0.1 %, and inputs leave at many ramps.
THRESHOLD = 0.025
# Seeds of the digits by which the promise is made and tested: fresh distortions, like those of the demo's load.
SHAPE_SEED = 31
TEST_SEED = 32
BATCH = 500  # digits per batch
# The promise: the largest share of answers that differ from the full network's, and its confidence.
MAX_DIFFERENT = 0.01
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Recipe:
    """The shape of the network and its training.

    `copies`: distortions of each digit that ramps are made from. `rows`: digits in each of the two exit tables.
    """

    num_blocks: int = 8
    width: int = 16
    steps: int = 1400
    batch: int = 64
    learning_rate: float = 7e-3
    copies: int = 4
    rows: int = 4000


RECIPE = Recipe()


def main() -> None:
    """Replace the shipped demos, float32 and int8."""
    for seed in range(SEEDS):
        with TemporaryDirectory() as folder:
            made = make_demo(Path(folder), seed)
            wrong = [f"{dtype}: {each}" for dtype, path in made.items() for each in shortcomings(path, dtype)]
            if not wrong:
                for dtype, path in made.items():
                    _ship(path, demo_directory(dtype))
                return
        print(f"seed {seed} is not good enough:", "; ".join(wrong), file=sys.stderr)
    raise UserError(f"none of {SEEDS} seeds gives a network that shows what the demo must show")


def make_demo(folder: Path, seed: int = 0, recipe: Recipe = RECIPE) -> dict[RampDtype, Path]:
    """Train the network, then its ramps for each precision, on one thread."""
    made: dict[RampDtype, Path] = {dtype: folder / dtype for dtype in SHIPPED}
    network = folder / "network"
    with _one_thread(), torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(seed)
        _save(_train(seed, recipe), network)
        for dtype, target in made.items():
            options = PrepareOptions(dtype=dtype, threshold=THRESHOLD)
            notes: dict[str, str | int | float] = {"data": "scikit-learn digits, distorted", "network_seed": seed}
            prepare(network, sample(recipe.copies), target, options, notes)
            write_evidence(target, dtype, recipe.rows)
    return made


def write_evidence(folder: Path, dtype: RampDtype, rows: int) -> None:
    """Write exit tables of fresh digits beside a network, so that thresholds can follow plans and inputs.

    The promise for the demo's one threshold is tested on these digits. No weight is changed.
    """
    model, rules = _loaded(folder, dtype), read_rules(folder / RULES)
    shape = ramp_logits(model, *_calibrating(rows))
    test = ramp_logits(model, *demo_digits(rows, NOISE, TEST_SEED))
    evidence = Evidence(_table(shape), _table(test), "agreement", MAX_DIFFERENT, CONFIDENCE)
    fixed = replace(evidence, test=_table(test, rules.ramps[0].threshold))
    notes = {name: note for name, note in rules.notes.items() if name != "reported_on"}
    rules = retuned(rules, fixed, fixed.test.strictest)
    rules = rules.model_copy(update={"version": 2, "notes": notes | {"tested_on": rows}})
    rules.write(folder / RULES)
    draw_exits(rules, folder / PICTURE)
    evidence.save(folder / EVIDENCE)


@torch.inference_mode()
def ramp_logits(model: BackedModel, images: Images, labels: Labels) -> RampLogits:
    """The calibrated logits of ramps and head for these digits."""
    ramps, heads = [], []
    for start in range(0, len(images), BATCH):
        pooled, logits = model.features(model.encode(list(images[start : start + BATCH])))
        ramps.append(torch.stack([model.ramps.logits(block, each) for block, each in enumerate(pooled)]))
        heads.append(logits.float() / model.ramps.rules.head_temperature)
    return RampLogits(torch.cat(ramps, dim=1), torch.cat(heads), torch.eye(model.num_labels)[torch.from_numpy(labels)])


def _table(logits: RampLogits, threshold: float | None = None) -> ExitTable:
    costs = [(block + 1) / (len(logits.ramps) + 1) for block in range(len(logits.ramps))]
    return replay(entropy, logits.ramps, logits.head, logits.truth, costs, threshold)


def _calibrating(rows: int) -> tuple[Images, Labels]:
    """Fresh distortions of the digits by which only temperatures were chosen."""
    images, labels = (part[NUM_TRAIN : NUM_TRAIN + NUM_CALIBRATE] for part in digits())
    random = torch.Generator().manual_seed(SHAPE_SEED)
    chosen = torch.randint(NUM_CALIBRATE, (rows,), generator=random).numpy()
    return distort(images[chosen], NOISE, random), labels[chosen]


def shortcomings(folder: Path, dtype: RampDtype) -> list[str]:
    quality = quality_of(as_served(folder, dtype))
    print(f"{dtype}: {quality}", file=sys.stderr)
    return quality.shortcomings()


def as_served(folder: Path, dtype: RampDtype) -> SplitModel:
    """The demo on torch, or in int8 on ONNX Runtime, prepared to run all blocks with exits and without."""
    model = _loaded(folder, dtype)
    if dtype == INT8:
        make_ready(model, folder, [BlockRange(0, model.num_blocks, ramps) for ramps in (model.ramp_blocks, ())])
    return model


def _loaded(folder: Path, dtype: RampDtype) -> BackedModel:
    return on_backend(load(folder), folder, "onnx", int8=True) if dtype == INT8 else load(folder)


def sample(copies: int) -> Sample:
    """Several distorted copies of each digit. All copies of a digit are in the same part."""
    images, labels = digits()
    random = torch.Generator().manual_seed(1)
    distorted = [distort(images, NOISE, random) for _ in range(copies)]
    origin = np.tile(np.arange(len(labels)), copies)
    ends = (NUM_TRAIN, NUM_TRAIN + NUM_CALIBRATE)
    parts = [np.flatnonzero(np.digitize(origin, ends) == part) for part in range(3)]
    return Sample(list(np.concatenate(distorted)), np.tile(labels, copies), Parts(*parts))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(seed: int, recipe: Recipe) -> Any:
    model = _network(recipe)
    images, labels = (part[:NUM_TRAIN] for part in digits())
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.2
    )
    random = torch.Generator().manual_seed(seed)
    for _ in show(range(recipe.steps), "training the demo model"):
        chosen = torch.randint(NUM_TRAIN, (recipe.batch,), generator=random).numpy()
        pixels = torch.from_numpy(distort(images[chosen], NOISE, random) / PIXEL_MAX).unsqueeze(1)
        loss = model(pixel_values=pixels, labels=torch.from_numpy(labels[chosen])).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def _network(recipe: Recipe) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=recipe.width,
        intermediate_size=2 * recipe.width,
        num_attention_heads=2,
        num_hidden_layers=recipe.num_blocks,
        # The usual 0.02 suits wide layers; these are narrow, and would hardly learn in these few steps.
        initializer_range=recipe.width**-0.5,
        id2label={digit: str(digit) for digit in range(10)},
        label2id={str(digit): digit for digit in range(10)},
    )
    return ViTForImageClassification(config).train()


def _save(model: Any, folder: Path) -> None:
    from transformers import ViTImageProcessor

    model.save_pretrained(folder)
    processor = ViTImageProcessor(
        do_resize=False,
        do_rescale=True,
        rescale_factor=1 / PIXEL_MAX,
        do_normalize=False,
        size={"height": 8, "width": 8},
    )
    processor.save_pretrained(folder)


def _ship(made: Path, target: Path) -> None:
    rmtree(target, ignore_errors=True)
    move(made, target)


if __name__ == "__main__":
    main()
