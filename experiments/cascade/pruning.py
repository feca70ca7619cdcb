"""Tabi's word pruning (its section 4.2): words to which the small network pays little attention are not shown to the
large one. Each layer and head is counted, special tokens always stay, and a word goes only if all its tokens would.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isobatch.deployments.models import TorchModel
from isobatch.deployments.models.loading import quietly

SHARES = (0.3, 0.5, 0.7, 0.9)  # of the mean attention that a text's tokens receive: what is below goes
BATCH = 16

Floats = NDArray[np.float64]
Measured = Callable[[TorchModel, Sequence[str]], float]


class Attentive:
    """The small network with attention that tells its weights, which the fast kernels do not."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        with quietly():
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            load = AutoModelForSequenceClassification.from_pretrained
            self._telling = load(folder, attn_implementation="eager").eval()
            self._fast = load(folder, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def cost(self, texts: Sequence[str], rounds: int = 3) -> float:
        """Its processor time over that of the fast kernels, in turns."""
        took_s = {True: 0.0, False: 0.0}
        for _ in range(rounds):
            for telling in took_s:
                began_s = time.thread_time()
                for batch in _batches(texts):
                    self._received(batch) if telling else self._fast(**self._tokens(batch))
                took_s[telling] += time.thread_time() - began_s
        return took_s[True] / took_s[False]

    @torch.inference_mode()
    def pruned(self, texts: Sequence[str], shares: Sequence[float]) -> Iterator[tuple[list[str], float]]:
        """For each share, the texts without the words that receive too little, and what part of all words went."""
        result = [each for batch in _batches(texts) for each in self._words(batch)]
        for share in shares:
            kept = [[word for word, received in words if received > share] for words in result]
            gone = 1 - sum(map(len, kept)) / max(1, sum(map(len, result)))
            yield [" ".join(words) or text for words, text in zip(kept, texts, strict=True)], gone

    def _tokens(self, texts: Sequence[str]) -> Any:
        return self._tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")

    def _received(self, texts: Sequence[str]) -> tuple[Any, torch.Tensor]:
        """What every token receives from all tokens of its text, over all layers and heads: 1 on average."""
        tokens = self._tokens(texts)
        weights = torch.stack(self._telling(**tokens, output_attentions=True).attentions).mean(dim=(0, 2))
        return tokens, (weights * tokens["attention_mask"].unsqueeze(2)).sum(dim=1)

    def _words(self, texts: Sequence[str]) -> Iterator[list[tuple[str, float]]]:
        """Every word of each text, and what the token of it receives that receives most."""
        tokens, received = self._received(texts)
        for row, text in enumerate(texts):
            words = dict[int, float]()
            for place, word in enumerate(tokens.word_ids(row)):
                if word is not None:
                    words[word] = max(words.get(word, 0.0), float(received[row, place]))
            spans = {word: tokens.word_to_chars(row, word) for word in words}
            yield [(text[spans[word].start : spans[word].end], value) for word, value in words.items()]


def measured(
    small: Path, large: TorchModel, texts: Sequence[str], truth: NDArray[np.int64], seconds: Measured
) -> Iterator[tuple[str, float]]:
    """What pruning brings where these texts go on to the large network: its time and accuracy over those without."""
    attentive = Attentive(small)
    yield "attention_cost", attentive.cost(texts)
    whole_s, whole = seconds(large, texts), _right(large, texts, truth)
    yield "rerouted_accuracy", whole
    for share, (shorter, gone) in zip(SHARES, attentive.pruned(texts, SHARES), strict=True):
        yield f"pruned_{share}_words", gone
        yield f"pruned_{share}_time", seconds(large, shorter) / whole_s
        yield f"pruned_{share}_lost", whole - _right(large, shorter, truth)


def _right(model: TorchModel, texts: Sequence[str], truth: NDArray[np.int64]) -> float:
    answers = [each.label for each in model.predict(texts, exits=False)]
    return float((np.array(answers) == truth).mean())


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(texts), BATCH):
        yield texts[start : start + BATCH]
