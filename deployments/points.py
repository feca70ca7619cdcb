"""Points of pictures: from heat maps to a picture's own coordinates and back, as transformers has them for ViTPose.

A network that finds points reads one person of a picture, whose box it is given. Here the box is the whole picture.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.model import Sides

Floats = NDArray[np.float32]


def box_of(sides: Sides) -> list[int]:
    """The whole picture as a box: left, top, width and height."""
    return [0, 0, sides.width, sides.height]


def points_of(maps: Floats, sides: Sides, reads: tuple[int, int]) -> Floats:
    """The point of each heat map, as x and y in a picture with these sides. `reads`: those that the network reads."""
    center, scale = _place(sides, reads)
    points: Floats = _processor().keypoints_from_heatmaps(maps[None], center[None], scale[None])[0][0]
    return points


def on_maps(points: Floats, sides: Sides, reads: tuple[int, int], grid: tuple[int, int]) -> Floats:
    """The reverse, without rounding: x and y on heat maps with these sides."""
    center, scale = _place(sides, reads)
    shown = scale * _processor().normalize_factor
    cells: Floats = (points - center + shown / 2) / shown * (np.array(grid[::-1], np.float32) - 1)
    return cells


def are_near(first: NDArray[Any], second: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Whether points, x and y along the last axis, are no further apart than this.

    >>> are_near(np.array([[0, 0], [0, 0]]), np.array([[3, 4], [4, 4]]), 5.0).tolist()
    [True, False]
    """
    near: NDArray[np.bool_] = np.hypot(*np.moveaxis(first - second, -1, 0)) <= tolerance
    return near


def _place(sides: Sides, reads: tuple[int, int]) -> tuple[Floats, Floats]:
    """The middle and the size of the part of a picture that the network reads."""
    from transformers.models.vitpose.image_processing_pil_vitpose import box_to_center_and_scale

    height, width = reads
    center, scale = box_to_center_and_scale(box_of(sides), image_width=width, image_height=height)
    return center, scale


@cache
def _processor() -> Any:
    from transformers import VitPoseImageProcessorPil

    return VitPoseImageProcessorPil()
