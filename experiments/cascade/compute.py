"""Two layers of MiniLM before all six, really computed on one thread, in processor time."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from experiments.cascade.networks import LAYERS, SETS, PublicSet, classifier, large_network
from isobatch.deployments.dispatch.route import stops
from isobatch.deployments.models import TorchModel, load, load_served
from isobatch.deployments.models.checkpoint import label_names
from isobatch.deployments.models.ramps import ExitRules, Ramps
from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.prepare.cascades import (
    CalibratedCombination,
    Combination,
    ComparisonTerms,
    calibrated,
    candidate,
    write_cascade,
)
from isobatch.deployments.prepare.sample import Sample
from isobatch.profiles.model import Batch

BATCH = 16
TIMED, ROUNDS = 320, 2  # texts, and how often they are run by each way
WAYS = {"cascade": Combination((0, 1)), "exits": Combination((1,), True), "both": Combination((0, 1), True)}


def measured(sets: int) -> Iterator[tuple[str, float]]:
    torch.set_num_threads(1)
    for data_set in SETS[:sets]:
        for name, value in _of(data_set):
            yield f"{name}_{data_set.name}", value


def _of(data_set: PublicSet) -> Iterator[tuple[str, float]]:
    sample = data_set.judged()
    folders = [classifier(data_set, LAYERS[0]), large_network(data_set)]
    labels = label_names(folders[-1])
    result = [candidate(folder, folder.name, sample, labels) for folder in folders]
    terms = _terms(sample, result[0].head.shape[1])
    costs = [[1.0] * layers for layers in LAYERS]  # layers of one width
    ways = {name: calibrated(result, way, costs, terms) for name, way in WAYS.items()}
    for name, made in ways.items():
        figures = made.figures(made.shown())
        yield f"{name}_lost", figures.lost
        yield f"{name}_accuracy", figures.accuracy
    for name, each in zip(("small", "large"), result, strict=True):
        right = each.head[terms.test].argmax(dim=1) == terms.truth[terms.test].argmax(dim=1)
        yield f"{name}_accuracy", float(right.float().mean())
    large = load(folders[-1]).with_ramps(Ramps(ExitRules()))
    yield from _times(ways, large, [sample.values[row] for row in terms.test[:TIMED]])


def _times(
    ways: Mapping[str, CalibratedCombination], large: TorchModel, texts: list[str]
) -> Iterator[tuple[str, float]]:
    """Of the large network over each way, in turns, so that whatever else the machine does slows all of them."""
    with TemporaryDirectory() as folder:
        models: dict[str, ServedModel] = {"large": large}
        for name, made in ways.items():
            write_cascade(Path(folder) / name, made, made.shown(), ComparisonTerms.policy, {})
            models[name] = load_served(Path(folder) / name)
        took_s = dict.fromkeys(models, 0.0)
        for _ in range(ROUNDS):
            for name, model in models.items():
                took_s[name] += seconds(model, texts)
    for name in ways:
        yield f"{name}_over_large", took_s["large"] / took_s[name]


def _terms(sample: Sample, num_labels: int) -> ComparisonTerms:
    assert sample.labels is not None, "This is a bug: the file has labels."
    truth = torch.nn.functional.one_hot(torch.from_numpy(sample.labels), num_labels).float()
    shape = np.concatenate((sample.parts.train, sample.parts.calibrate))
    return ComparisonTerms(truth, shape, sample.parts.test)


def seconds(model: ServedModel, texts: Sequence[str]) -> float:
    """Processor time for all texts in batches of one size: survivors wait at every stop until they fill one."""
    whole = model.encode(texts)
    model.run(model.select(whole, np.arange(BATCH)), model.num_blocks, ())  # loads and warms up
    began_s = time.thread_time()
    waiting = [whole]
    for stop in stops(0, model.num_blocks, model.ramp_blocks):
        waiting = [
            after for batch in _full(model, waiting) if (after := model.run(batch, stop, model.ramp_blocks).survivors)
        ]
    return time.thread_time() - began_s


def _full(model: ServedModel, waiting: list[Batch]) -> Iterator[Batch]:
    if not waiting:
        return
    together = model.merge([replace(batch, truncated=frozenset()) for batch in waiting])
    for start in range(0, len(together), BATCH):
        yield model.select(together, np.arange(start, min(start + BATCH, len(together))))
