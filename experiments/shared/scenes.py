"""Draws scenes, pictures of scikit-learn's digits on noise with a label for each pixel, and trains a SegFormer.

A pixel is background or one of five digits. Some scenes are easy (few large digits, little noise), the others hard
(many small digits, much noise). Training has its own digits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

SIDE = 64
GRID = SIDE // 4  # of the network's map
DIGITS = 5  # 0 to 4
NAMES = ("background", *map(str, range(DIGITS)))
BATCH, RATE = 32, 5e-3
TRAINED_ON = 8000
# Pixels of a digit and its rim above this brightness, from 0 to 1, have its label.
EDGE = 0.3


@dataclass(frozen=True)
class SceneKind:
    """The most digits, their height in pixels, and the noise."""

    digits: tuple[int, int]
    heights: tuple[int, int]
    noise: float


EASY, HARD = SceneKind((1, 3), (26, 40), 0.1), SceneKind((4, 8), (16, 24), 0.3)
EASY_SHARE = 0.6


@dataclass(frozen=True)
class Scenes:
    """Grey pictures (0 to 255), and the label of every pixel; both are scenes x height x width."""

    pictures: NDArray[np.uint8]
    labels: NDArray[np.int64]


def drawn(count: int, seed: int) -> Scenes:
    """Scenes of this seed; seed 0 has the digits of training."""
    images, shapes, digits = _digits()
    random = np.random.default_rng(seed)
    chosen = np.flatnonzero(np.arange(len(images)) % 2 == (0 if seed == 0 else 1))
    grounds, labels = np.zeros((count, SIDE, SIDE)), np.zeros((count, SIDE, SIDE), np.int64)
    for ground, marks in zip(grounds, labels, strict=True):
        kind = EASY if random.random() < EASY_SHARE else HARD
        for _ in range(random.integers(*kind.digits, endpoint=True)):
            digit, side = random.choice(chosen), int(random.integers(*kind.heights, endpoint=True))
            top, left = random.integers(0, SIDE - side, 2, endpoint=True)
            place = slice(top, top + side), slice(left, left + side)
            if marks[place].any():  # no digit hides another
                continue
            grown, shape = (_grown(each[digit], side) for each in (images, shapes))
            ground[place][shape > 0.5] = grown[shape > 0.5]
            marks[place][shape > 0.5] = digits[digit] + 1
        ground += random.normal(0, kind.noise, ground.shape)
    return Scenes((64 + 128 * grounds).clip(0, 255).astype(np.uint8), labels)


@cache
def _digits() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Pictures of 10 x 10 pixels from 0 to 1, their shapes (a digit and a rim around it), and the digits."""
    images, digits = load_digits(n_class=DIGITS, return_X_y=True)
    images = np.pad(images.reshape(-1, 8, 8) / 16, ((0, 0), (1, 1), (1, 1)))
    shapes = functional.max_pool2d(torch.from_numpy(images > EDGE).double(), 3, stride=1, padding=1).numpy()
    return images, shapes, digits


def _grown(image: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    across = _weights(len(image), side)
    grown: NDArray[np.float64] = across @ image @ across.T
    return grown


@cache
def _weights(small: int, large: int) -> NDArray[np.float64]:
    """The weights of a small picture's pixels in each pixel of a large one, along one side."""
    at = ((np.arange(large) + 0.5) * (small / large) - 0.5).clip(0, small - 1)
    weights: NDArray[np.float64] = np.maximum(1 - np.abs(at[:, None] - np.arange(small)), 0.0)
    return weights


def on_grid(labels: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    """The label in the middle of each pixel of a map of this side; a row for each scene."""
    places = ((np.arange(side) + 0.5) * (labels.shape[1] / side)).astype(int)
    return labels[:, places][:, :, places].reshape(len(labels), -1)


def scene_network(folder: Path, steps: int, depths: tuple[int, ...] = (2, 2, 2), progress: Any = iter) -> None:
    """Train a small SegFormer, and write it as a checkpoint. `progress` wraps the steps."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessorPil

    torch.manual_seed(0)
    config = SegformerConfig(
        num_channels=1,
        num_encoder_blocks=len(depths),
        depths=list(depths),
        hidden_sizes=[32, 64, 96][: len(depths)],
        num_attention_heads=[1, 2, 4][: len(depths)],
        sr_ratios=[4, 1, 1][: len(depths)],
        patch_sizes=[7, 3, 3][: len(depths)],
        strides=[4, 2, 2][: len(depths)],
        mlp_ratios=[2, 2, 2][: len(depths)],
        decoder_hidden_size=48,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        initializer_range=0.1,  # narrow layers need it: with the usual 0.02, all pixels are background after 440 steps
        id2label=dict(enumerate(NAMES)),
        label2id={name: number for number, name in enumerate(NAMES)},
    )
    model = SegformerForSemanticSegmentation(config)
    processor = SegformerImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_mean=[0.25], image_std=[0.25])
    _train(model, processor, progress(range(steps)), steps)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)


def _train(model: Any, processor: Any, each_step: Iterable[int], steps: int) -> None:
    learnt = drawn(min(TRAINED_ON, BATCH * steps), seed=0)
    arrays = processor(images=list(learnt.pictures[..., None]), return_tensors="pt", input_data_format="channels_last")
    pixels, labels = arrays["pixel_values"], torch.from_numpy(on_grid(learnt.labels, GRID))
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    model.train()
    for _ in each_step:
        rows = torch.randint(len(labels), (BATCH,))
        loss = functional.cross_entropy(model(pixel_values=pixels[rows]).logits.flatten(2), labels[rows])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
