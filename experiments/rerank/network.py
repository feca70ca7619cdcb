"""Makes a reranker of QNLI's questions and sentences from all-MiniLM-L6-v2, once, and keeps it in the cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.shared.machine import data
from experiments.shared.minilm import source
from isobatch.deployments.folders import cache_directory, locked, replacing
from isobatch.deployments.models.loading import quietly
from isobatch.deployments.prepare.data import Columns, rows
from isobatch.deployments.prepare.records import Layout
from isobatch.deployments.progress import show

LENGTH = 10  # documents of a list: a question's own sentence, and nine others
NEGATIVES = 1  # sentences of other questions for each question in a step of fine-tuning
STEPS, QUESTIONS, LEARNING_RATE = 120, 8, 1e-4
LONGEST = 48  # tokens of a pair in fine-tuning

Pair = tuple[str, str]


def answered(part: str) -> list[Pair]:
    """Questions with a sentence that answers each of them. `part`: "train" or "dev"."""
    headless = Columns(text="question", pair="sentence", layout=Layout(("index", "question", "sentence", "label")))
    path, columns = (
        (data("text/qnli/train_5k.csv"), headless) if part == "train" else (data("text/qnli/dev.tsv"), Columns())
    )
    return [row.value for row in rows(path, columns) if str(row.label) in ("0", "entailment")]


def lists_of(pairs: Sequence[Pair], most: int) -> list[tuple[str, list[str]]]:
    """Questions, each with its own sentence first, then the nine best of a search by words."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    sentences = sorted({sentence for _, sentence in pairs})
    words = TfidfVectorizer(sublinear_tf=True)
    searched = words.fit_transform(sentences).T
    made, seen = list[tuple[str, list[str]]](), set[str]()
    for place in np.random.default_rng(0).permutation(len(pairs)).tolist():
        question, own = pairs[place]
        if question in seen or len(made) == most:
            continue
        seen.add(question)
        near = np.argsort(-(words.transform([question]) @ searched).toarray()[0], kind="stable")[:LENGTH].tolist()
        others = [sentences[each] for each in near if sentences[each] != own]
        made.append((question, [own, *others[: LENGTH - 1]]))
    return made


def reranker() -> Path:
    """The directory of the checkpoint."""
    target = cache_directory() / "minilm-qnli-reranker"
    with locked(target):
        if not target.is_dir():
            with quietly(), replacing(target) as draft:
                _fine_tune(answered("train"), draft)
    return target


def _fine_tune(pairs: Sequence[Pair], folder: Path) -> None:
    from transformers import AutoTokenizer, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(source())
    model: Any = BertForSequenceClassification.from_pretrained(source(), num_labels=1).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    for _ in show(range(STEPS), "fine-tuning MiniLM (once)"):
        chosen = [pairs[place] for place in random.choice(len(pairs), QUESTIONS, replace=False)]
        others = [pairs[place][1] for place in random.integers(len(pairs), size=NEGATIVES * QUESTIONS)]
        questions = [question for question, _ in chosen] * (1 + NEGATIVES)
        sentences = [*(sentence for _, sentence in chosen), *others]
        tokens = tokenizer(
            questions, sentences, padding=True, truncation="longest_first", max_length=LONGEST, return_tensors="pt"
        )
        relevant = torch.tensor([[1.0]] * QUESTIONS + [[0.0]] * len(others))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(**tokens).logits, relevant)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
