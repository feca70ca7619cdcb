"""Claim: a reranker with exits ranks more documents per second, and keeps its promise of NDCG@10.

MiniLM is fine-tuned on QNLI; a list has a question's own sentence and the nine best others of a search. `isobatch
prepare --queries` promises a loss of at most 1 %. New lists are timed with exits and without, in turns. To count broken
promises, lists are drawn again and again from recorded scores, as samples of `prepare`; a promise is broken if all
lists together lose more.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from experiments.rerank.network import LENGTH, answered, lists_of, reranker
from experiments.shared.kept_parts import place_of
from isobatch.deployments.models import TorchModel, load
from isobatch.deployments.models.checkpoint import label_names, task_at
from isobatch.deployments.prepare.data import Columns, rows
from isobatch.deployments.prepare.measuring import PrepareOptions
from isobatch.deployments.prepare.pipeline import prepare
from isobatch.deployments.prepare.sample import LabelNames, draw
from isobatch.deployments.progress import show
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exit_table import ExitTable, outcome
from isobatch.profiles.losses import NDCG, Indices
from isobatch.profiles.ranking import RankedLists

PROMISED = 0.01
TURNS = 2


def measure(lists: int = 860, fresh: int = 100, repeats: int = 100) -> dict[str, float]:
    result = lists_of(answered("dev"), lists + fresh)
    folder = _prepared(result[:lists])
    figures = _broken(Evidence.read(folder / EVIDENCE), repeats)
    network = load(folder)
    return figures | _timed(network, result[lists:])


def _prepared(result: list[tuple[str, list[str]]]) -> Path:
    """The reranker with exits for these lists; kept, so that an interrupted run continues after it."""
    network, folder = reranker(), place_of("rerank", str(len(result)))
    if folder.exists():
        return folder
    relevance = [1] + [0] * (LENGTH - 1)
    lines = [json.dumps({"query": each, "documents": texts, "relevance": relevance}) for each, texts in result]
    with TemporaryDirectory() as name:
        data = Path(name) / "lists.jsonl"
        data.write_text("\n".join(lines))
        names, task = LabelNames(label_names(network)), task_at(network)
        sample = draw(rows(data, Columns()), data, names, LENGTH * len(result), task=task, queries=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    prepare(network, sample, folder, PrepareOptions(max_accuracy_loss=PROMISED, metric=NDCG))
    return folder


def _broken(evidence: Evidence, repeats: int) -> dict[str, float]:
    """The share of broken promises, each made with lists that are drawn from all recorded ones."""
    everything, random = _joined(evidence.shape, evidence.test), np.random.default_rng(0)
    shape, test = (len(each.ndcg(each.at_end)) for each in (evidence.shape, evidence.test))
    broken = 0
    for _ in show(range(repeats), "promises"):
        drawn = redrawn(everything, random, shape), redrawn(everything, random, test)
        again = Evidence(*drawn, NDCG, PROMISED, evidence.confidence)
        broken += outcome(everything, again.prepared, NDCG).lost.mean > PROMISED
    return {"promises_broken_share": broken / repeats}


def _joined(first: ExitTable, second: ExitTable) -> ExitTable:
    """One table with the lists of both."""
    names = ("first", "right", "labels", "truth", "agreed", "scores", "lists", "relevance")
    return replace(
        first, **{name: np.concatenate((getattr(first, name), getattr(second, name)), axis=-1) for name in names}
    )


def redrawn(table: ExitTable, random: np.random.Generator, count: int) -> ExitTable:
    """This number of lists, drawn from a table with repetition; repeated lists count as different ones."""
    assert table.lists is not None, "This is a bug: these are lists."
    order, numbers = np.argsort(table.lists, kind="stable"), np.unique(table.lists)
    starts = np.searchsorted(table.lists[order], [*numbers, numbers[-1] + 1])
    chosen = [order[starts[each] : starts[each + 1]] for each in random.integers(len(numbers), size=count)]
    lists: Indices = np.repeat(np.arange(count), [len(each) for each in chosen])
    return replace(table.of(np.concatenate(chosen)), lists=lists)


def _timed(network: TorchModel, result: list[tuple[str, list[str]]]) -> dict[str, float]:
    """The speed and NDCG@10 with exits, compared with those without."""
    values = [(question, text) for question, texts in result for text in texts]
    ranked = RankedLists(np.repeat(np.arange(len(result)), LENGTH), np.tile(np.eye(LENGTH)[0], len(result)))
    seconds, ndcg = {True: list[float](), False: list[float]()}, {}
    network.predict(values[: len(values) // 10])  # warms up
    for turn in show(range(TURNS), "timing"):
        for exits in (True, False) if turn % 2 else (False, True):
            began_s = time.perf_counter()
            answers = network.predict(values, exits)
            seconds[exits].append(time.perf_counter() - began_s)
            ndcg[exits] = float(ranked.ndcg(np.array([each.score for each in answers])).mean())
    return {
        "ndcg_lost": ndcg[False] - ndcg[True],
        "documents_per_s_over_full": min(seconds[False]) / min(seconds[True]),
    }
