"""Records the exits of thousands of inputs in three networks: two that are fitted here to public texts, and the demo.

The networks of texts are fitted in seconds: block k is a linear classifier over the most frequent words, with more
words from block to block. They are no transformers, but they have what affects a promise: easy texts that few words
decide, hard texts that early blocks get wrong, and noisy labels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.demos.digits import ramp_logits
from experiments.promise.recordings import Recorded, keep
from experiments.shared.machine import data
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import NOISE, demo_digits
from isobatch.deployments.exits import entropy
from isobatch.deployments.models import load
from isobatch.deployments.prepare.data import Columns, rows
from isobatch.deployments.prepare.measuring import RampLogits
from isobatch.deployments.prepare.records import Layout
from isobatch.deployments.prepare.thresholds import replay

WORDS = (50, 200, 800, 3_000, 12_000, 48_000)  # words that each block reads
CALIBRATE = 2_000  # texts for the temperatures alone
DIGITS, DIGITS_SEED = 20_000, 21

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Texts:
    """Public texts, the names of their labels in each file, and the number of texts for fitting."""

    files: tuple[tuple[str, Columns, tuple[str, ...]], ...]
    fitted: int

    def read(self) -> tuple[list[str], Labels]:
        """All texts, in a fixed random order."""
        result = [
            (str(row.value), names.index(str(row.label)))
            for name, columns, names in self.files
            for row in rows(data(name), columns)
        ]
        order = np.random.default_rng(0).permutation(len(result))
        return [result[place][0] for place in order], np.array([result[place][1] for place in order])


_TOPICS = ("World", "Sports", "Business", "Sci/Tech")
_TITLED = Columns(text="text", layout=Layout(header=("label", "title", "text")))
SOURCES = {
    "sst2": Texts((("text/sst2_glue/train.tsv", Columns(), ("0", "1")),), fitted=20_000),
    "agnews": Texts(
        (
            ("text/agnews/train_10k.tsv", Columns(layout=Layout(header=("text", "label"))), _TOPICS),
            ("text/agnews/test.csv", _TITLED, ("1", "2", "3", "4")),
        ),
        fitted=5_000,
    ),
}


def table(name: str) -> str:
    """Record the inputs, and return the name of the recording."""
    return keep(of_demo() if name == "demo" else of_texts(SOURCES[name]))


def of_texts(source: Texts) -> Recorded:
    texts, labels = source.read()
    truth = torch.eye(int(labels.max()) + 1)[torch.from_numpy(labels)]
    blocks = torch.stack(list(_cascade(texts, labels, source.fitted)))
    logits, start = RampLogits(blocks[:-1], blocks[-1], truth), source.fitted
    calibrate, others = _part(logits, start, start + CALIBRATE), _part(logits, start + CALIBRATE, len(labels))
    return _recorded(others.calibrated(calibrate.temperatures()))


def _part(logits: RampLogits, start: int, stop: int) -> RampLogits:
    return RampLogits(logits.ramps[:, start:stop], logits.head[start:stop], logits.truth[start:stop])


def _cascade(texts: Sequence[str], labels: Labels, fitted: int) -> Iterator[Tensor]:
    """The logits of each block for all texts."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    for words in WORDS:
        reads = TfidfVectorizer(max_features=words, token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 2), sublinear_tf=True)
        features = reads.fit(texts[:fitted]).transform(texts)
        classifier = LogisticRegression(C=4.0, max_iter=200).fit(features[:fitted], labels[:fitted])
        yield torch.from_numpy(classifier.predict_log_proba(features)).float()


def of_demo() -> Recorded:
    """The shipped network with its temperatures, and newly distorted digits that it was not trained on."""
    return _recorded(ramp_logits(load(demo_directory()), *demo_digits(DIGITS, NOISE, DIGITS_SEED)))


def _recorded(logits: RampLogits) -> Recorded:
    depths = [(block + 1) / (len(logits.ramps) + 1) for block in range(len(logits.ramps))]
    known = replay(entropy, logits.ramps, logits.head, logits.truth, depths)
    believed = replay(entropy, logits.ramps, logits.head, logits.softened_truth(), depths)
    return Recorded(known, believed)
