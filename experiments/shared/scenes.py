"""Drawn scenes: pictures of scikit-learn's digits on noise, of which every pixel has a label, and a SegFormer for them.

Every pixel is background or one of ten digits, of which a scene has one to six. The digits of training are others than
those of all else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch.nn import functional

SIDE, MOST_DIGITS, NOISE = 32, 6, 0.15
GRID = SIDE // 2  # of the network's map, which halves the picture
NAMES = ("background", *map(str, range(10)))
BATCH, RATE = 32, 3e-3
TRAINED_ON = 4000


@dataclass(frozen=True)
class Scenes:
    """Grey pictures (0 to 255), and the label of every pixel; both are scenes x height x width."""

    pictures: NDArray[np.uint8]
    labels: NDArray[np.int64]


def drawn(count: int, seed: int) -> Scenes:
    """Seed 0 has the digits of training."""
    images, digits = load_digits(return_X_y=True)
    images, random = images.reshape(-1, 8, 8) / 16, np.random.default_rng(seed)
    chosen = np.flatnonzero(np.arange(len(images)) % 2 == (0 if seed == 0 else 1))
    grounds, labels = random.normal(0, NOISE, (count, SIDE, SIDE)), np.zeros((count, SIDE, SIDE), np.int64)
    for ground, marks in zip(grounds, labels, strict=True):
        for _ in range(random.integers(1, MOST_DIGITS + 1)):
            digit, (top, left) = random.choice(chosen), random.integers(0, SIDE - 8, 2)
            place = slice(top, top + 8), slice(left, left + 8)
            ground[place] += images[digit]
            marks[place][images[digit] > 0.3] = digits[digit] + 1
    return Scenes((64 + 128 * grounds).clip(0, 255).astype(np.uint8), labels)


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
        hidden_sizes=[16, 32, 48][: len(depths)],
        num_attention_heads=[1, 2, 4][: len(depths)],
        sr_ratios=[4, 2, 1][: len(depths)],
        patch_sizes=[3, 3, 3][: len(depths)],
        strides=[2, 2, 2][: len(depths)],
        mlp_ratios=[2, 2, 2][: len(depths)],
        decoder_hidden_size=48,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        id2label=dict(enumerate(NAMES)),
        label2id={name: number for number, name in enumerate(NAMES)},
    )
    model = SegformerForSemanticSegmentation(config)
    processor = SegformerImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_mean=[0.25], image_std=[0.25])
    _train(model, processor, progress(range(steps)), steps)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)


def _train(model: Any, processor: Any, each_step: Iterable[int], steps: int) -> None:
    learnt = drawn(TRAINED_ON, seed=0)
    arrays = processor(images=list(learnt.pictures[..., None]), return_tensors="pt", input_data_format="channels_last")
    pixels, labels = arrays["pixel_values"], torch.from_numpy(learnt.labels)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    model.train()
    for _ in each_step:
        rows = torch.randint(len(labels), (BATCH,))
        grown = functional.interpolate(model(pixel_values=pixels[rows]).logits, (SIDE, SIDE), mode="bilinear")
        loss = functional.cross_entropy(grown, labels[rows])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
