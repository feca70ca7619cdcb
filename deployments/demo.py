"""The built-in demo: a small vision transformer on scikit-learn's handwritten digits, made at first use.

It is a checkpoint like any other, with ramps made by the same `prepare`. Its inputs are real digits as a hasty scanner
would deliver them: shifted, turned and scaled a little, with `noise` on every pixel. More noise makes them harder, so
exits move deeper.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deployments.folders import alone, cache_directory
from deployments.models.loading import quietly
from deployments.models.ramps import RampDtype
from deployments.prepare.measuring import Options
from deployments.prepare.pipeline import prepare
from deployments.prepare.sample import Parts, Sample
from deployments.progress import show

# To be raised whenever something here changes what is made: a cached demo is found by it.
VERSION = "2"
PIXEL_MAX = 16.0
NOISE = 0.1
TURN, ZOOM, SHIFT = 0.12, 0.1, 0.1

NUM_BLOCKS = 8
WIDTH = 16
STEPS = 1400
BATCH = 64
LEARNING_RATE = 7e-3

NUM_TRAIN, NUM_CALIBRATE = 1000, 400
COPIES = 2
# Copies of one digit are no independent witnesses: half of the 1 % that may be lost is kept back for that.
MAX_ACCURACY_LOSS = 0.005

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


def demo_directory(dtype: RampDtype = "float32") -> Path:
    """The demo's checkpoint: trained at first use, then kept in the cache. Whoever comes meanwhile waits.

    In int8 it is the same network, with ramps made for 8-bit blocks.
    """
    target = cache_directory() / (f"demo-{VERSION}" if dtype == "float32" else f"demo-{VERSION}-{dtype}")
    with alone(target):
        if not target.is_dir():
            make_demo(target) if dtype == "float32" else _prepare(demo_directory(), target, dtype)
    return target


def demo_inputs(count: int, noise: float = NOISE, seed: int = 0) -> Images:
    """Digits that no part of the demo was made from, 8 x 8, values 0..16. With repetition, each time distorted anew."""
    images, _ = demo_digits(count, noise, seed)
    return images


def demo_digits(count: int, noise: float = NOISE, seed: int = 0) -> tuple[Images, Labels]:
    """The same, with what they show."""
    images, labels = _digits()
    kept = slice(NUM_TRAIN + NUM_CALIBRATE, None)
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(labels[kept]), (count,), generator=random).numpy()
    return distort(images[kept][chosen], noise, random), labels[kept][chosen]


def held_out_digits() -> tuple[Images, Labels]:
    """All digits that the network was not trained on, as they are in the data set."""
    images, labels = _digits()
    return images[NUM_TRAIN:], labels[NUM_TRAIN:]


def distort(images: Images, noise: float, random: torch.Generator) -> Images:
    """Shift by 0.4 pixels at most, turn by 7 degrees, scale by 10 %, and add noise (in shares of full ink)."""
    count = len(images)

    def uniform(most: float) -> Tensor:
        return (2 * torch.rand(count, generator=random) - 1) * most

    angle, scale = uniform(TURN), 1 + uniform(ZOOM)
    moves = torch.zeros(count, 2, 3)
    moves[:, 0, 0] = moves[:, 1, 1] = angle.cos() * scale
    moves[:, 1, 0] = angle.sin() * scale
    moves[:, 0, 1] = -moves[:, 1, 0]
    moves[:, 0, 2], moves[:, 1, 2] = uniform(SHIFT), uniform(SHIFT)
    pixels = torch.from_numpy(images / PIXEL_MAX).unsqueeze(1)
    grid = nn.functional.affine_grid(moves, list(pixels.shape), align_corners=False)
    pixels = nn.functional.grid_sample(pixels, grid, align_corners=False)
    pixels = pixels + noise * torch.rand(count, 1, 1, 1, generator=random) * torch.randn(pixels.shape, generator=random)
    distorted: Images = (pixels.clamp(0, 1).squeeze(1) * PIXEL_MAX).numpy()
    return distorted


def make_demo(target: Path) -> None:
    """Train the network, then its ramps: always the same, on one thread, whatever the caller has set."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder, quietly():
            torch.manual_seed(0)
            _save(_train(), Path(folder))
            _prepare(Path(folder), target, "float32")
    finally:
        torch.set_num_threads(threads)


def _prepare(source: Path, target: Path, dtype: RampDtype) -> None:
    options = Options(dtype=dtype, max_accuracy_loss=MAX_ACCURACY_LOSS)
    prepare(source, _sample(), target, options, {"data": "scikit-learn digits, distorted"})


def _sample() -> Sample:
    """Several distorted copies of each digit; copies of one digit never stand in two parts."""
    images, labels = _digits()
    random = torch.Generator().manual_seed(1)
    copies = [distort(images, NOISE, random) for _ in range(COPIES)]
    origin = np.tile(np.arange(len(labels)), COPIES)
    ends = (NUM_TRAIN, NUM_TRAIN + NUM_CALIBRATE)
    parts = [np.flatnonzero(np.digitize(origin, ends) == part) for part in range(3)]
    return Sample(list(np.concatenate(copies)), np.tile(labels, COPIES), Parts(*parts))


@cache
def _digits() -> tuple[Images, Labels]:
    """Shuffled once, always in the same way."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return data.images[order].astype(np.float32), data.target[order].astype(np.int64)


def _train() -> Any:
    model = _network()
    images, labels = (part[:NUM_TRAIN] for part in _digits())
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=STEPS, pct_start=0.2)
    random = torch.Generator().manual_seed(0)
    for _ in show(range(STEPS), "training the demo model (once)"):
        chosen = torch.randint(NUM_TRAIN, (BATCH,), generator=random).numpy()
        pixels = torch.from_numpy(distort(images[chosen], NOISE, random) / PIXEL_MAX).unsqueeze(1)
        loss = model(pixel_values=pixels, labels=torch.from_numpy(labels[chosen])).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def _network() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=2,
        num_hidden_layers=NUM_BLOCKS,
        # The usual 0.02 suits wide layers: these are narrow, and would hardly learn in so few steps.
        initializer_range=WIDTH**-0.5,
        id2label={digit: str(digit) for digit in range(10)},
        label2id={str(digit): digit for digit in range(10)},
    )
    model = ViTForImageClassification(config).train()
    model.set_attn_implementation("eager")
    return model


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
