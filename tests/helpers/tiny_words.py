"""A tiny network that labels words, trained in a second on sentences that are made up: who, and where."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.made_once import made_once
from tests.helpers.tiny_tokenizers import save_trained

NAMES = ("O", "B-PER", "I-PER", "B-LOC")
PEOPLE, SURNAMES, PLACES = ("ada", "bob", "eve"), ("bee", "reed"), ("rome", "oslo")
OTHERS = ("the", "in", "saw", "was", "of", ".")
CONTINUED = ("##s", "##n")
STEPS, TEXTS = 60, 24

Sentence = tuple[list[str], list[str]]


def sentence(random: np.random.Generator) -> Sentence:
    """Words and their labels. Whether a surname is the beginning of a person, the word before it says."""
    words, labels = list[str](), list[str]()
    for _ in range(int(random.integers(2, 7))):
        kind = random.integers(4)
        if kind == 0:
            alone = random.random() < 0.2  # then a surname is where a person begins
            words += (
                [str(random.choice(SURNAMES))] if alone else [str(random.choice(each)) for each in (PEOPLE, SURNAMES)]
            )
            labels += ["B-PER", "I-PER"][: 1 if alone else 2]
        elif kind == 1:
            words.append(str(random.choice(PLACES)) + str(random.choice(["", "s", "n"])))
            labels.append("B-LOC")
        words.append(str(random.choice(OTHERS)))
        labels.append("O")
    return words, labels


def sentences(count: int, seed: int = 0) -> list[Sentence]:
    random = np.random.default_rng(seed)
    return [sentence(random) for _ in range(count)]


@made_once
def word_network(folder: Path) -> None:
    words = [*PEOPLE, *SURNAMES, *PLACES, *OTHERS, *CONTINUED]
    save_trained(folder, "BertForTokenClassification", words, NAMES, _losses)


def _losses(model: Any, tokenizer: Any) -> Iterator[torch.Tensor]:
    for step in range(STEPS):
        words, labels = zip(*sentences(TEXTS, seed=1000 + step), strict=True)
        tokens = tokenizer(list(words), is_split_into_words=True, padding=True, return_tensors="pt")
        wanted = torch.full(tokens["input_ids"].shape, -100)
        for row, own in enumerate(labels):
            for at, word in enumerate(tokens.word_ids(row)):
                if word is not None:
                    wanted[row, at] = NAMES.index(own[word])
        yield model(**tokens, labels=wanted).loss


def conll(path: Path, found: list[Sentence]) -> Path:
    """A file with a word and its label a line."""
    path.write_text("\n\n".join("\n".join(map("\t".join, zip(*each, strict=True))) for each in found) + "\n")
    return path
