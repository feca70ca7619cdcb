"""What is asked of the servers: the demo's digits, and sentences for a text classifier of MiniLM's size."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.backend import minilm
from experiments.packing.texts import POSITIONS, lengths_of, untrained_minilm
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import demo_inputs
from isobatch.profiles.errors import UserError
from isobatch.profiles.lengths import WORD, text_of

INPUTS = 256


@dataclass(frozen=True)
class PeerWorkload:
    """A network, and inputs for it."""

    name: str
    folder: str
    inputs: Sequence[Any]
    says: str

    def body(self, value: Any, listed: bool) -> bytes:
        return json.dumps({"inputs": [value] if listed else value}).encode()

    def bodies(self, listed: bool) -> list[bytes]:
        return [self.body(value, listed) for value in self.inputs]


def workloads(folder: Path) -> list[PeerWorkload]:
    digits = [digit.tolist() for digit in demo_inputs(INPUTS)]
    return [PeerWorkload("demo", str(demo_directory()), digits, "the demo"), _text(folder)]


def _text(folder: Path) -> PeerWorkload:
    """MiniLM on SST-2 with its exits, where its weights are at hand; else its shape, untrained and without exits."""
    try:
        prepared = minilm.prepared()
    except UserError:
        made = _untrained(folder / "minilm-shape")
        texts = [text_of(int(count)) for count in _lengths()]
        return PeerWorkload("minilm", str(made), texts, "a BERT of MiniLM's shape, random weights, no exits")
    return PeerWorkload("minilm", str(prepared), minilm.sentences("test", INPUTS)[0], "MiniLM on SST-2, with exits")


def _lengths() -> list[int]:
    """As SST-2's sentences are, where they are at hand; else drawn like them."""
    try:
        return [int(each) for each in lengths_of("sst2")[:INPUTS]]
    except UserError:
        return [int(each) for each in np.random.default_rng(0).integers(5, 45, INPUTS)]


def _untrained(folder: Path) -> Path:
    from transformers import BertTokenizer

    untrained_minilm().save_pretrained(folder)
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", WORD]
    vocabulary = {word: index for index, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, model_max_length=POSITIONS).save_pretrained(folder)
    return folder
