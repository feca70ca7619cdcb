"""Two layers of MiniLM before all six, fine-tuned on SST-2, really computed on one thread, in processor time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from experiments.shared.machine import data
from experiments.shared.minilm import fine_tune, prepared, sentences, source
from isobatch.deployments.dispatch.route import stops
from isobatch.deployments.folders import cache_directory, locked, replacing
from isobatch.deployments.models import load, load_served
from isobatch.deployments.models.checkpoint import label_names
from isobatch.deployments.models.loading import quietly
from isobatch.deployments.models.ramps import ExitRules, Ramps
from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.prepare.cascades import (
    Combination,
    ComparisonTerms,
    calibrated,
    candidate,
    write_cascade,
)
from isobatch.deployments.prepare.data import Columns, rows
from isobatch.deployments.prepare.sample import LabelNames, Sample, draw
from isobatch.profiles.model import Batch

LAYERS = (2, 6)
LEARNT_ROWS, JUDGED_ROWS = 6000, 3000
BATCH = 16
TIMED, ROUNDS = 320, 2  # texts, and how often each way runs them
WAYS = {"cascade": Combination((0, 1)), "exits": Combination((1,), True), "both": Combination((0, 1), True)}


def measured() -> Iterator[tuple[str, float]]:
    """What each way loses of the large network's accuracy, and its speed over the large network's, ways in turns."""
    torch.set_num_threads(1)
    sample, folders = _judged(), [_small(), prepared()]
    result = [candidate(folder, folder.name, sample, label_names(folders[-1])) for folder in folders]
    terms = _terms(sample, result[0].head.shape[1])
    texts = [sample.values[row] for row in terms.test[:TIMED]]
    models: dict[str, ServedModel] = {"large": load(folders[-1]).with_ramps(Ramps(ExitRules()))}
    with TemporaryDirectory() as folder:
        for name, way in WAYS.items():
            made = calibrated(result, way, [[1.0] * layers for layers in LAYERS], terms)  # layers of one width
            shown = made.shown()
            yield f"{name}_lost", made.figures(shown).lost
            write_cascade(Path(folder) / name, made, shown, ComparisonTerms.policy, {})
            models[name] = load_served(Path(folder) / name)
        took_s = dict.fromkeys(models, 0.0)
        for _ in range(ROUNDS):
            for name, model in models.items():
                took_s[name] += seconds(model, texts)
    for name in WAYS:
        yield f"{name}_over_large", took_s["large"] / took_s[name]


def _small() -> Path:
    """MiniLM's first layers, fine-tuned for a short time: at first use, then kept in the cache."""
    target = cache_directory() / f"minilm-sst2-{LAYERS[0]}"
    with locked(target):
        if not target.is_dir():
            with quietly(), replacing(target) as draft:
                fine_tune(source(), *sentences("train", LEARNT_ROWS), draft, LAYERS[0])
    return target


def _judged() -> Sample:
    """Rows that no network learnt from, by which networks are combined and judged."""
    path = data("text/sst2_glue/dev.tsv")
    return draw(rows(path, Columns()), path, LabelNames(("negative", "positive")), JUDGED_ROWS)


def _terms(sample: Sample, num_labels: int) -> ComparisonTerms:
    assert sample.labels is not None, "This is a bug: the file has labels."
    truth = torch.nn.functional.one_hot(torch.from_numpy(sample.labels), num_labels).float()
    shape = np.concatenate((sample.parts.train, sample.parts.calibrate))
    return ComparisonTerms(truth, shape, sample.parts.test)


def seconds(model: ServedModel, texts: Sequence[str]) -> float:
    """Processor time for all texts in batches of one size: survivors wait at every stop until they fill a batch."""
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
