"""The demo's inputs: handwritten digits with distortions like those of a scanner.

digits.npz has the 1,797 digits of the UCI repository's test set (E. Alpaydin, C. Kaynak; CC BY 4.0), which scikit-learn
contains too. They are shifted, turned and scaled a little, with `noise` on every pixel. More noise makes them harder,
so inputs leave at deeper ramps.
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

DIGITS = Path(__file__).with_name("digits.npz")
PIXEL_MAX = 16.0  # the largest value of a pixel
NOISE = 0.1  # standard deviation of the usual noise, as a share of full ink
# Largest distortions: radians, share of the size, and share of half the width.
TURN = 0.12
ZOOM = 0.1
SHIFT = 0.1
# Digits that the network is trained on, and digits that its ramps are calibrated on; the rest is for tests and loads.
NUM_TRAIN = 1000
NUM_CALIBRATE = 400

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


def demo_inputs(count: int, noise: float = NOISE, seed: int = 0) -> Images:
    """Digits that no part of the demo was made from: 8 x 8, values 0..16. Digits repeat, with fresh distortions."""
    images, _ = demo_digits(count, noise, seed)
    return images


def demo_digits(count: int, noise: float = NOISE, seed: int = 0) -> tuple[Images, Labels]:
    """The same digits with their labels."""
    images, labels = digits()
    unused = slice(NUM_TRAIN + NUM_CALIBRATE, None)
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(labels[unused]), (count,), generator=random).numpy()
    return distort(images[unused][chosen], noise, random), labels[unused][chosen]


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


@cache
def digits() -> tuple[Images, Labels]:
    """All digits of the data set, shuffled in a fixed order."""
    with np.load(DIGITS) as data:
        images, labels = data["images"], data["labels"]
    order = np.random.default_rng(0).permutation(len(labels))
    return images[order].astype(np.float32), labels[order].astype(np.int64)
