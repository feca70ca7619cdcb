"""Class maps: the label of every pixel of a picture, at any size, as run lengths, as a PNG or as rows of numbers."""

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMS = ("runs", "png", "array")
MOST_PIXELS = 2**22  # of a map that a client asks for
MOST_TOGETHER = 2**24  # pixels of the maps of one request, which stand in memory at once
MOST_COMPARED = 2**28  # pixels x labels of the maps of one request: about a second of a thread
MOST_COLOURS = 256  # labels of a PNG
Labels = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class MapStyle:
    """How maps are written, and at which height and width; None: at the network's own."""

    form: str = "runs"
    size: tuple[int, int] | None = None

    def written(self, labels: Labels) -> Any:
        return labels.tolist() if self.form == "array" else (png_of if self.form == "png" else runs_of)(labels)


RUNS = MapStyle()


def class_map(logits: Floats, size: tuple[int, int] | None) -> Labels:
    """The most probable label of each pixel. `logits`: height x width x labels.

    At another size the logits are interpolated before a label is chosen, as transformers does it
    (`post_process_semantic_segmentation`). One row is made at a time, as all logits of a large map take gigabytes.
    """
    if size is None or size == logits.shape[:2]:
        own: Labels = logits.argmax(axis=2)
        return own
    above, below, down = _neighbours(logits.shape[0], size[0])
    left, right, across = _neighbours(logits.shape[1], size[1])

    def rows() -> Iterator[Labels]:
        for first, second, part in zip(above, below, down, strict=True):
            row = logits[first] * (1 - part) + logits[second] * part
            yield (row[left] * (1 - across)[:, None] + row[right] * across[:, None]).argmax(axis=1)

    return np.stack(list(rows()))


def _neighbours(count: int, wanted: int) -> tuple[Labels, Labels, Floats]:
    """The two pixels of a line that each wanted pixel lies between, and the part of the second one.

    >>> [each.tolist() for each in _neighbours(2, 4)]
    [[0, 0, 0, 1], [1, 1, 1, 1], [0.0, 0.25, 0.75, 0.25]]
    """
    at = np.maximum((np.arange(wanted) + 0.5) * (count / wanted) - 0.5, 0.0)
    first = at.astype(np.int64)
    return first, np.minimum(first + 1, count - 1), (at - first).astype(np.float32)


def runs_of(labels: Labels) -> list[list[int]]:
    """Each label with the number of pixels in a row that have it, line by line.

    >>> runs_of(np.array([[3, 3, 0], [0, 0, 5]]))
    [[3, 2], [0, 3], [5, 1]]
    """
    flat = labels.ravel()
    begins = np.flatnonzero(np.append(True, flat[1:] != flat[:-1]))
    runs: list[list[int]] = np.stack((flat[begins], np.diff(np.append(begins, len(flat)))), axis=1).tolist()
    return runs


def labels_of_runs(runs: list[list[int]]) -> Labels:
    """
    >>> labels_of_runs([[3, 2], [0, 3], [5, 1]]).tolist()
    [3, 3, 0, 0, 0, 5]
    """
    labels, lengths = np.array(runs, np.int64).T
    return np.repeat(labels, lengths)


def png_of(labels: Labels) -> str:
    """A PNG in base64 whose pixels are labels. Its palette, that of PASCAL VOC, gives each label a colour."""
    from PIL import Image

    picture, content = Image.fromarray(labels.astype(np.uint8)), BytesIO()
    picture.putpalette(_palette())
    picture.save(content, "PNG")
    return b64encode(content.getvalue()).decode()


@cache
def _palette() -> bytes:
    """Red, green and blue of each label, whose lowest bits become the highest ones of the colours.

    >>> list(_palette()[:12])
    [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0]
    """
    return bytes(
        sum((label >> (3 * place + colour) & 1) << (7 - place) for place in range(3))
        for label in range(MOST_COLOURS)
        for colour in range(3)
    )
