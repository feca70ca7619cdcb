"""MiniLM with random weights, and the lengths of real texts."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.shared.machine import data
from experiments.shared.untrained import NoEncoder
from isobatch.deployments.models.families import family_of
from isobatch.deployments.models.ramps import Ramps
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.prepare.data import Columns, rows
from isobatch.deployments.prepare.records import Layout
from isobatch.profiles.model import Batch

ROWS = 800  # of each data set, the first ones
POSITIONS, WORDS = 512, 30522
FILES = {
    "sst2": ("text/sst2_glue/test.tsv", Columns()),
    "agnews": ("text/agnews/test.csv", Columns(text="title", pair="text", layout=Layout(("class", "title", "text")))),
    "qnli": ("text/qnli/dev.tsv", Columns(text="question", pair="sentence")),
}
MARKS = 2  # [CLS] and [SEP]

Integers = NDArray[np.int64]


def untrained_minilm(layers: int = 6) -> Any:
    """A network of all-MiniLM-L6-v2's shape with random weights, since time does not depend on the weights."""
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_labels": 2}
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, vocab_size=WORDS, **shape)).eval()


def cut(network: Any) -> TorchModel:
    anatomy = family_of("bert").dissect(network)
    return TorchModel(anatomy, NoEncoder(), Ramps(), ["0", "1"], torch.device("cpu"), torch.float32)


def lengths_of(data_set: str) -> Integers:
    """Lengths in words and punctuation marks, slightly below MiniLM's tokens, since its tokenizer is not at hand."""
    path, columns = FILES[data_set]
    result = [_tokens(row.value) for row, _ in zip(rows(data(path), columns), range(ROWS), strict=False)]
    lengths: Integers = np.minimum(np.array(result), POSITIONS)
    return lengths


def _tokens(text: str | tuple[str, str]) -> int:
    """
    >>> _tokens("it 's fine."), _tokens(("why?", "because"))
    (7, 6)
    """
    parts = [text] if isinstance(text, str) else text
    return MARKS + len(parts) - 1 + sum(len(re.findall(r"\w+|[^\w\s]", part)) for part in parts)


def batch_of(lengths: Sequence[int] | Integers, seed: int) -> Batch:
    """Random words in texts of these lengths."""
    ids = np.random.default_rng(seed).integers(5, WORDS, int(np.sum(lengths)))
    return Batch(0, {"input_ids": ids}, np.zeros((len(lengths), 0), np.float32), np.asarray(lengths, np.int64))
