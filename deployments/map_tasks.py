"""The tasks of networks whose answers are maps of a picture: the label of every pixel, or a heat map for each point."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.deployments.class_maps import RUNS, MapStyle, class_map, labels_of_runs
from isobatch.deployments.points import points_of
from isobatch.deployments.tasks import (
    CLASSIFICATION,
    LABELS,
    REGRESSION,
    SCORING,
    TOKENS,
    Outputs,
    Task,
    TaskAnswer,
    Tensors,
    best_labels,
    logits_of,
    parts_of,
)
from isobatch.profiles.losses import MEAN_IOU
from isobatch.profiles.model import Label, Probability, Sides, probabilities_in


class PixelClassification(Task):
    """One label for each pixel of a picture, on a grid of the network's own (its height and width).

    `style`: how maps are written. The rows of an answer's logits are pixels, line by line.
    """

    name = "semantic-segmentation"
    heads = "ForSemanticSegmentation"
    by_map = True
    metrics = ("agreement", "accuracy", MEAN_IOU)
    answered = "pixels"
    loaders: Mapping[str, str] = MappingProxyType({"image": "AutoModelForSemanticSegmentation"})
    tensors: Tensors = MappingProxyType({"label": ("INT64", [-1, -1]), "score": ("FP32", [-1, -1])})

    def __init__(self, grid: tuple[int, int] = (1, 1), style: MapStyle = RUNS) -> None:
        self.grid, self.style = grid, style

    def parts(self, num_labels: int) -> int:
        return self.grid[0] * self.grid[1]

    def styled(self, style: MapStyle) -> "PixelClassification":
        return PixelClassification(self.grid, style)

    def named(self, label: Label, names: Sequence[str]) -> tuple[str, ...]:
        """The names of the labels that occur."""
        return tuple(names[each] for each in sorted(set(parts_of(label))))

    def output(self, answer: TaskAnswer, names: Sequence[str], top: int = 0) -> Outputs:
        """The map, and the share of each label that occurs; `top`: the labels with the largest mean probability."""
        labels = class_map(self._on_grid(logits_of(answer)), self.style.size)
        counts = np.bincount(labels.ravel(), minlength=len(names)) / labels.size
        occurring = [label for label in np.argsort(-counts, kind="stable").tolist() if counts[label]]
        height, width = labels.shape
        output = {"height": height, "width": width, self.style.form: self.style.written(labels)}
        output["labels"] = [{"label": each, "name": names[each], "share": float(counts[each])} for each in occurring]
        output["score"] = float(np.mean(answer.score))
        if top:
            output["scores"] = best_labels(probabilities_in(logits_of(answer)).mean(axis=0), names, top)
        return output

    def parsed(self, output: Outputs, names: Sequence[str]) -> tuple[Label, Any, Probability]:
        """From runs at the network's own size. The score of each pixel is the mean of all."""
        label = tuple(labels_of_runs(output["runs"]).tolist())
        return label, self.named(label, names), (output["score"],) * len(label)

    def columns(self, answers: Sequence[TaskAnswer], names: Sequence[str]) -> Outputs:
        return {
            "label": np.array([answer.label for answer in answers], np.int64).reshape(-1, *self.grid),
            "score": np.array([answer.score for answer in answers], np.float32).reshape(-1, *self.grid),
        }

    def probabilities(self, answers: Sequence[TaskAnswer]) -> NDArray[np.float32]:
        return np.stack([self._on_grid(probabilities_in(logits_of(answer))) for answer in answers])

    def _on_grid(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return rows.reshape(*self.grid, -1)


class Keypoints(Task):
    """The points of a picture, each at the maximum of its heat map, which is its score.

    `grid`: height and width of the heat maps, `reads`: of the pictures that the network reads. An answer has one part
    for each point: in `label` the cell of its map, and in the rows of its logits the maps.
    """

    name = "keypoint-detection"
    heads = "ForPoseEstimation"
    by_map = True
    numbers = True
    policy = "five_best"
    metrics = ("agreement", "accuracy")
    answered = "points"
    loaders: Mapping[str, str] = MappingProxyType({"image": "VitPoseForPoseEstimation"})
    tensors: Tensors = MappingProxyType(
        {"points": ("FP32", [-1, 2]), "label": ("INT64", [-1]), "score": ("FP32", [-1])}
    )

    def __init__(self, grid: tuple[int, int] = (1, 1), reads: tuple[int, int] = (1, 1)) -> None:
        self.grid, self.reads, self.map_width = grid, reads, grid[1]

    def choices(self, num_labels: int) -> int:
        return self.grid[0] * self.grid[1]

    def parts(self, num_labels: int) -> int:
        return num_labels

    def score_sizes(self, num_labels: int) -> list[int]:
        return [num_labels, *self.grid]

    def on_maps(self, cells: NDArray[Any]) -> NDArray[np.float64]:
        """x and y of cells on their heat maps, along a last axis."""
        return np.stack((cells % self.map_width, cells // self.map_width), axis=-1).astype(np.float64)

    def named(self, label: Label, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names)

    def output(self, answer: TaskAnswer, names: Sequence[str], top: int = 0) -> Outputs:
        """Every point in the picture's own coordinates; `top`: the surest ones."""
        parts = zip(names, self._points(answer).tolist(), parts_of(answer.score), parts_of(answer.label), strict=True)
        points = [
            {"label": label, "name": name, "x": x, "y": y, "score": score, "cell": cell}
            for label, (name, (x, y), score, cell) in enumerate(parts)
        ]
        output: Outputs = {"points": points}
        if top:
            output["scores"] = best_labels(np.array(answer.score, np.float32), names, top)
        return output

    def parsed(self, output: Outputs, names: Sequence[str]) -> tuple[Label, Any, Probability]:
        label, named, score = (tuple(point[part] for point in output["points"]) for part in ("cell", "name", "score"))
        return label, named, score

    def columns(self, answers: Sequence[TaskAnswer], names: Sequence[str]) -> Outputs:
        return {
            "points": np.stack([self._points(answer) for answer in answers]),
            "label": np.array([answer.label for answer in answers], np.int64),
            "score": np.array([answer.score for answer in answers], np.float32),
        }

    def probabilities(self, answers: Sequence[TaskAnswer]) -> NDArray[np.float32]:
        """The heat maps."""
        return np.stack([self._maps(answer) for answer in answers])

    def _maps(self, answer: TaskAnswer) -> NDArray[np.float32]:
        return logits_of(answer).reshape(-1, *self.grid)

    def _points(self, answer: TaskAnswer) -> NDArray[np.float32]:
        assert isinstance(answer.words, Sides), "This is a bug: the sides of a picture are known where it was encoded."
        return points_of(self._maps(answer), answer.words, self.reads)


PIXELS, KEYPOINTS = PixelClassification(), Keypoints()
TASKS: tuple[Task, ...] = (CLASSIFICATION, LABELS, TOKENS, PIXELS, KEYPOINTS, SCORING, REGRESSION)
