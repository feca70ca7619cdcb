"""Tiny networks with one output, trained in a second on texts that are made up: a reranker, and one of numbers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.made_once import made_once
from tests.helpers.preparing import prepare_network
from tests.helpers.tiny_tokenizers import save_trained

TOPICS = (("ball", "goal", "team"), ("bank", "tax", "price"), ("film", "song", "play"))
OTHERS = ("the", "in", "saw", "was", "of", ".")
DOCUMENTS = 6  # of a list
STEPS, TEXTS = 100, 32

List = tuple[str, list[str], list[int]]  # a query, its documents, and the relevance of each


def document(random: np.random.Generator) -> tuple[str, list[int]]:
    """A text, and how many words it has of each topic."""
    topics = random.choice(3, size=int(random.integers(1, 4)))
    words = [str(random.choice(TOPICS[topic])) for topic in topics]
    words += [str(random.choice(OTHERS)) for _ in range(int(random.integers(1, 5)))]
    random.shuffle(words)
    return " ".join(words), np.bincount(topics, minlength=3).tolist()


def lists(count: int, seed: int = 0) -> list[List]:
    """Documents with two words of sport are the best ones, with one the second best, whatever the query."""
    random = np.random.default_rng(seed)
    made: list[List] = []
    while len(made) < count:
        result = [document(random) for _ in range(DOCUMENTS)]
        query = f"{random.choice(OTHERS)} {len(made)}"
        relevance = [min(2, counts[0]) for _, counts in result]
        if len(set(relevance)) > 1:
            made.append((query, [each for each, _ in result], relevance))
    return made


def numbered(count: int, seed: int = 0) -> list[tuple[str, float]]:
    """Texts, and a number of each from -10 to 20."""
    random = np.random.default_rng(seed)
    result = [document(random) for _ in range(count)]
    return [(text, 5.0 * counts[0] + 2.0 * counts[1] - 3.0 * counts[2]) for text, counts in result]


def pairs(result: list[List]) -> tuple[list[tuple[str, str]], np.ndarray]:
    values = [(query, each) for query, documents, _ in result for each in documents]
    return values, np.array([each for *_, relevance in result for each in relevance])


@made_once
def reranker(folder: Path) -> None:
    values, relevance = pairs(lists(STEPS * TEXTS // DOCUMENTS, seed=1000))
    _train(folder, [list(each) for each in zip(*values, strict=True)], relevance / 2, None)


@made_once
def network_of_numbers(folder: Path) -> None:
    texts, numbers = zip(*numbered(STEPS * TEXTS, seed=1000), strict=True)
    _train(folder, [list(texts)], np.array(numbers), "regression")


def _train(folder: Path, columns: list[list[str]], targets: np.ndarray, problem: str | None) -> None:
    miss = torch.nn.functional.mse_loss if problem else torch.nn.functional.binary_cross_entropy_with_logits
    wanted = torch.from_numpy(targets).float()[:, None]

    def losses(model: Any, tokenizer: Any) -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            rows = slice(step * TEXTS, (step + 1) * TEXTS)
            tokens = tokenizer(*(each[rows] for each in columns), padding=True, truncation=True, return_tensors="pt")
            yield miss(model(**tokens).logits, wanted[rows])

    words = [*(word for words in TOPICS for word in words), *OTHERS]
    save_trained(folder, "BertForSequenceClassification", words, ("score",), losses, problem)


@made_once
def prepared_reranker(folder: Path) -> None:
    """`out`: the reranker with ramps that may lose a lot. Beside it lie its data and what the command printed."""
    prepare_network(folder, reranker(), in_lists(folder / "a.jsonl", lists(300, seed=7)), "8%", "--queries")


@made_once
def prepared_network_of_numbers(folder: Path) -> None:
    prepare_network(folder, network_of_numbers(), in_numbers(folder / "a.csv", numbered(900, seed=7)), "5%")


@torch.inference_mode()
def reference_outputs(folder: Path, columns: list[list[str]]) -> np.ndarray:
    """Those of the plain network in transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(*columns, padding=True, return_tensors="pt")
    return model(**tokens).logits[:, 0].numpy()


def in_lists(path: Path, result: list[List]) -> Path:
    """A file with a list of documents in each row."""
    rows = [{"query": query, "documents": documents, "relevance": each} for query, documents, each in result]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def in_pairs(path: Path, result: list[List]) -> Path:
    """A file with a document in each row."""
    values, relevance = pairs(result)
    lines = [f"{query},{each},{value}" for (query, each), value in zip(values, relevance.tolist(), strict=True)]
    path.write_text("\n".join(["query,document,label", *lines]) + "\n")
    return path


def in_numbers(path: Path, result: list[tuple[str, float]]) -> Path:
    path.write_text("\n".join(["text,score", *(f"{text},{number}" for text, number in result)]) + "\n")
    return path
