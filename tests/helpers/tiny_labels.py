"""A tiny network that gives texts several labels, trained in a second on texts that are made up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.made_once import made_once
from tests.helpers.tiny_tokenizers import save_trained

NAMES = ("sport", "money", "art", "rare")
WORDS = (("ball", "goal", "team"), ("bank", "tax", "price"), ("film", "song", "play"), ("comet",))
OTHERS = ("the", "in", "saw", "was", "of", ".")
SHARES = (0.5, 0.4, 0.3, 0.05)  # of texts that have each label
STEPS, TEXTS = 130, 32

Text = tuple[str, tuple[str, ...]]


def text(random: np.random.Generator) -> Text:
    """A text, and its labels: those of its words, but a play in a team is sport alone."""
    given = [name for name, share in zip(NAMES, SHARES, strict=True) if random.random() < share]
    words = [str(random.choice(WORDS[NAMES.index(name)])) for name in given]
    words += [str(random.choice(OTHERS)) for _ in range(int(random.integers(1, 5)))]
    random.shuffle(words)
    if {"play", "team"} <= set(words):
        given.remove("art")
    return " ".join(words), tuple(given)


def texts(count: int, seed: int = 0) -> list[Text]:
    random = np.random.default_rng(seed)
    return [text(random) for _ in range(count)]


def flags(result: list[Text]) -> np.ndarray:
    return np.array([[int(name in labels) for name in NAMES] for _, labels in result])


@made_once
def label_network(folder: Path) -> None:
    words = [*(word for words in WORDS for word in words), *OTHERS]
    save_trained(folder, "BertForSequenceClassification", words, NAMES, _losses, "multi_label_classification")


def _losses(model: Any, tokenizer: Any) -> Iterator[torch.Tensor]:
    for step in range(STEPS):
        result = texts(TEXTS, seed=1000 + step)
        tokens = tokenizer([each for each, _ in result], padding=True, return_tensors="pt")
        yield model(**tokens, labels=torch.from_numpy(flags(result)).float()).loss


@torch.inference_mode()
def reference_logits(inputs: list[str]) -> np.ndarray:
    """Those of the plain network in transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(label_network()).eval()
    tokens = AutoTokenizer.from_pretrained(label_network())(inputs, padding=True, return_tensors="pt")
    return model(**tokens).logits.numpy()


def listed(path: Path, result: list[Text], separator: str = ",") -> Path:
    """A file with a column of texts and a column of labels."""
    lines = [f'{each},"{separator.join(labels)}"' for each, labels in result]
    path.write_text("\n".join(["text,labels", *lines]) + "\n")
    return path


def flagged(path: Path, result: list[Text]) -> Path:
    """A file with a column of 0 and 1 for each label."""
    lines = [",".join([each, *map(str, row)]) for (each, _), row in zip(result, flags(result).tolist(), strict=True)]
    path.write_text("\n".join([",".join(["text", *NAMES]), *lines]) + "\n")
    return path
