"""Makes the built-in demo that is shipped with the package: `make demo`, several minutes.

Networks trained by this recipe differ: seeds, and on another processor the last bits of the arithmetic, decide where
inputs leave and what that costs. So the threshold is not searched, and several seeds are tried in turn: the first
network is shipped that shows all that the demo must show (demo_quality.py), by a margin. What is shipped is the same
everywhere; what is made anew on another machine is another network, as good.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import move, rmtree
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch

from deployments.demo import demo_directory
from deployments.demo.digits import NOISE, NUM_CALIBRATE, NUM_TRAIN, PIXEL_MAX, digits, distort
from deployments.models import load
from deployments.models.backends import INT8, make_ready, on_backend
from deployments.models.loading import quietly
from deployments.models.ramps import RampDtype
from deployments.models.seam import Stretch
from deployments.prepare.demo_quality import quality_of
from deployments.prepare.measuring import PrepareOptions
from deployments.prepare.pipeline import prepare
from deployments.prepare.sample import Parts, Sample
from deployments.progress import show
from profiles.errors import UserError
from profiles.model import SplitModel

SEEDS = 8
# One threshold at every ramp. Those that a search picks on 400 digits (whose copies are no independent witnesses) were
# too good to be true: of two networks, one lost 0.8 % of the accuracy where 0.5 % was allowed, and 11 % of the inputs
# entered its second half. With this one threshold both lose less than 0.1 %, and inputs leave all along.
THRESHOLD = 0.025


@dataclass(frozen=True)
class Recipe:
    """The shape of the network and how it is trained. `copies`: distortions of each digit that ramps are made from."""

    num_blocks: int = 8
    width: int = 16
    steps: int = 1400
    batch: int = 64
    learning_rate: float = 7e-3
    copies: int = 4


RECIPE = Recipe()


def main() -> None:
    """Replace the demo that is shipped, float32 and int8."""
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
    """Train the network, then its ramps for either precision: on one thread, whatever the caller has set."""
    made: dict[RampDtype, Path] = {dtype: folder / dtype for dtype in get_args(RampDtype)}
    network = folder / "network"
    with _one_thread(), torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(seed)
        _save(_train(seed, recipe), network)
        for dtype, target in made.items():
            options = PrepareOptions(dtype=dtype, threshold=THRESHOLD)
            notes: dict[str, str | int | float] = {"data": "scikit-learn digits, distorted", "network_seed": seed}
            prepare(network, sample(recipe.copies), target, options, notes)
    return made


def shortcomings(folder: Path, dtype: RampDtype) -> list[str]:
    quality = quality_of(as_served(folder, dtype))
    print(f"{dtype}: {quality}", file=sys.stderr)
    return quality.shortcomings()


def as_served(folder: Path, dtype: RampDtype) -> SplitModel:
    """On torch, or in 8 bits on ONNX Runtime."""
    model: SplitModel = load(folder)
    if dtype == INT8:
        model = on_backend(model, folder, "onnx", int8=True)
        blocks = range(model.num_blocks)
        make_ready(model, folder, [Stretch(0, len(blocks), ramps) for ramps in (model.ramp_blocks, ())])
    return model


def sample(copies: int) -> Sample:
    """Several distorted copies of each digit; copies of one digit never stand in two parts."""
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
        # The usual 0.02 suits wide layers: these are narrow, and would hardly learn in so few steps.
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
