"""Tiny ViTPoses: one for small pictures of three coloured spots, trained in seconds, and random ones of every kind."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from isobatch.deployments.points import on_maps
from isobatch.deployments.prepare.bridges import SPREAD, squared_distances
from isobatch.profiles.model import Sides
from tests.helpers.made_once import made_once

READS, GRID, PATCH = (64, 48), (32, 24), 8
NAMES = ("red", "green", "blue")
SIDES, SPOT = Sides(60, 50), 4  # of the pictures, and of half a spot
STEPS = 90
HARD = 0.3  # of the pictures: their spots are dim and their noise strong


class Spots(NamedTuple):
    """Pictures, and x and y of the middle of each spot."""

    pictures: NDArray[np.uint8]
    points: NDArray[np.float32]


def spots(count: int, seed: int) -> Spots:
    random = np.random.default_rng(seed)
    middles = random.integers(SPOT, [SIDES.width - SPOT, SIDES.height - SPOT], (count, len(NAMES), 2))
    light, noise = np.where(random.random(count) < HARD, [[90.0], [60.0]], [[160.0], [10.0]])
    pictures = np.full((count, *SIDES, 3), 60.0)
    for picture, points, brightness in zip(pictures, middles, light, strict=True):
        for colour, (x, y) in enumerate(points):
            picture[y - SPOT : y + SPOT, x - SPOT : x + SPOT, colour] += brightness
    pictures += random.normal(0, 1, pictures.shape) * noise[:, None, None, None]
    return Spots(pictures.clip(0, 255).astype(np.uint8), middles.astype(np.float32))


def _config(**options: Any) -> Any:
    import transformers

    inner = transformers.VitPoseBackboneConfig(
        image_size=list(READS), patch_size=[PATCH, PATCH], hidden_size=32, num_hidden_layers=4, num_attention_heads=2,
        mlp_ratio=2, initializer_range=0.1, **{"out_indices": [4], **options.pop("inner", {})},
    )  # fmt: skip
    ids = {"id2label": dict(enumerate(NAMES)), "label2id": {name: number for number, name in enumerate(NAMES)}}
    return transformers.VitPoseConfig(backbone_config=inner, **ids, **options)


def _save(model: Any, folder: Path) -> None:
    import transformers

    model.eval().save_pretrained(folder)
    transformers.VitPoseImageProcessorPil(size={"height": READS[0], "width": READS[1]}).save_pretrained(folder)


@made_once
def random_network(folder: Path, kind: str) -> None:
    """`classic`: with the other head; `experts`: of ViTPose++; `early`: whose head reads an earlier layer."""
    import transformers

    torch.manual_seed(0)
    options: dict[str, dict[str, Any]] = {
        "classic": {"use_simple_decoder": False},
        "experts": {"inner": {"num_experts": 2, "part_features": 8}},
        "early": {"inner": {"out_indices": [3]}},
    }
    _save(transformers.VitPoseForPoseEstimation(_config(**options[kind])), folder)


@made_once
def point_network(folder: Path) -> None:
    """The trained network: a Hugging Face checkpoint without ramps."""
    import transformers

    torch.manual_seed(0)
    model, learnt = transformers.VitPoseForPoseEstimation(_config()), spots(640, seed=0)
    pixels = torch.from_numpy(encoded(learnt.pictures))
    places = np.concatenate([on_maps(points, SIDES, READS, GRID) for points in learnt.points])
    maps = torch.from_numpy(np.exp(squared_distances(places, *GRID) / (-2 * SPREAD**2))).float()
    maps = maps.reshape(len(pixels), len(NAMES), *GRID)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=STEPS)
    for _ in range(STEPS):
        rows = torch.randint(len(pixels), (32,))
        loss = 1e3 * torch.nn.functional.mse_loss(model(pixel_values=pixels[rows]).heatmaps, maps[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    _save(model, folder)


def encoded(pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
    """As transformers encodes them, each as a whole."""
    import transformers

    processor = transformers.VitPoseImageProcessorPil(size={"height": READS[0], "width": READS[1]})
    boxes = [[[0, 0, SIDES.width, SIDES.height]]] * len(pictures)
    arrays = processor(list(pictures), boxes=boxes, return_tensors="np", input_data_format="channels_last")
    pixels: NDArray[np.float32] = np.asarray(arrays["pixel_values"], np.float32)
    return pixels


@torch.inference_mode()
def reference(pictures: NDArray[np.uint8], folder: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The heat maps of the plain network in transformers, and the points that it makes of them."""
    import transformers

    model = transformers.VitPoseForPoseEstimation.from_pretrained(folder).eval()
    experts = torch.zeros(len(pictures), dtype=torch.long)
    outputs = model(pixel_values=torch.from_numpy(encoded(pictures)), dataset_index=experts)
    processor = transformers.VitPoseImageProcessorPil(size={"height": READS[0], "width": READS[1]})
    boxes = [[[0, 0, SIDES.width, SIDES.height]]] * len(pictures)
    poses = processor.post_process_pose_estimation(outputs, boxes)
    return outputs.heatmaps.numpy(), np.stack([pose["keypoints"].numpy() for (pose,) in poses])
