"""`isobatch evaluate`: the quality of a network's answers on new inputs, in full and with exits."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from isobatch.cluster.commands import Dtype, KeyVariable, key_headers, server_at, share_cores
from isobatch.cluster.commands.shared_options import (
    READS,
    DeviceHere,
    Labels,
    Queries,
    ReadingOptions,
    check_unread,
    label_names,
    with_options,
)
from isobatch.cluster.load.request_bodies import predicts_at
from isobatch.deployments.map_tasks import Keypoints
from isobatch.deployments.prepare.data import Row, naming_rows
from isobatch.deployments.prepare.sample import check_scores, labels_of, sampled, sampled_lists, words_of
from isobatch.deployments.tasks import task_of
from isobatch.profiles.errors import UserError

if TYPE_CHECKING:
    from isobatch.cluster.evaluation import Evaluation
    from isobatch.deployments.models.predict import PredictedAnswer
    from isobatch.deployments.models.served_model import ServedModel


@with_options(reading=ReadingOptions)
def evaluate(
    reading: ReadingOptions,
    model: Annotated[str, typer.Argument(help="Directory, hub id or URL of a checkpoint made by `isobatch prepare`.")],
    data: Annotated[Path, f"Inputs on which it was not prepared, labelled or not: {READS}."],
    url: Annotated[str | None, "Take the answers with exits from this server, which runs the same network."] = None,
    api_key_variable: KeyVariable = None,
    labels: Labels = None,
    queries: Queries = False,
    max_rows: Annotated[int, typer.Option(min=1, help="The most rows; more are sampled uniformly.")] = 2000,
    device: DeviceHere = "auto",
    dtype: Annotated[
        Dtype | None, "Precision of the network; if not given, the one for which its ramps were made."
    ] = None,
    seed: Annotated[int, "For the sample."] = 0,
    as_json: Annotated[bool, "Print JSON, for other programs."] = False,
) -> None:
    """Measure accuracy, macro-F1, MCC and recall, in full and with exits, agreement and depth, with 95 % intervals.
    Where a network gives scores: their error, and with --queries NDCG@10.

    Example: [bold]isobatch evaluate my-bert-ee --data fresh.csv --dtype bfloat16[/]
    """
    share_cores()
    from isobatch.cluster import evaluation as evaluating
    from isobatch.deployments.models import checkpoint
    from isobatch.deployments.models.ramps import made_from
    from isobatch.deployments.prepare.report import class_table, warnings

    check_unread({"--api-key-variable": api_key_variable and not url}, "is for --url: leave it out")
    key = key_headers(api_key_variable)
    server = predicts_at(server_at(url), key) if url else None
    located = checkpoint.locate(model)
    console = Console(soft_wrap=True, stderr=as_json, markup=False)
    rows, lists = reading.rows_for(located, console, data), None
    if queries:
        sample, lists = sampled_lists(rows, data, max_rows, seed)
    else:
        sample = sampled(rows, max_rows, seed)
    if made_from(located, data):
        known = f"ramps were trained on inputs of {data.name}, and are surer of them than of others: give other inputs"
        console.print(known, style="yellow", highlight=False)
    network = evaluating.loaded(located, device, dtype)  # after the data, so that a wrong file is reported at once
    if not network.ramp_blocks and not server:
        raise UserError(f"{model} has no ramps: make some with 'isobatch prepare'")
    names, task = label_names(located, labels, reading.label_separator), task_of(network)
    check_unread({"--queries": queries and not task.by_score}, f"is for networks with one output: {model} gives labels")
    check_unread({"--labels": labels and task.by_score}, f"is for networks that give labels: {model} gives a score")
    truth, values = labels_of(sample, data, names, task), [row.value for row in sample]
    if not queries:
        check_scores(sample, truth, data, task)
    with naming_rows(data, sample):
        if server:  # the server comes first, so that a wrong URL is reported before anything is computed
            exits = evaluating.served(server, values, key, task, network.labels)
            evaluating.check_same_network(server, exits, network)
        else:
            exits = evaluating.answered(network, values)
        full = evaluating.answered(network, values, exits=False)
        evaluating.check_same_sizes(server, full, exits)
    evaluation = _compared(full, exits, sample, truth, lists, network)
    if as_json:
        print(evaluation.as_json())
        return
    console.print(evaluating.table(evaluation))
    if (promise := network.ramps.rules.promise) and (sentence := evaluating.broken_promise(promise, evaluation)):
        console.print(sentence, style="yellow", highlight=False)
    if evaluation.classes:
        console.print(class_table(evaluation.classes, network.labels, task.answered))
        for warning in warnings(evaluation.classes, network.labels, task=task):
            console.print(warning, style="yellow", highlight=False)


def _compared(
    full: "Sequence[PredictedAnswer]", exits: "Sequence[PredictedAnswer]", sample: Sequence[Row],
    truth: NDArray[Any] | None, lists: NDArray[np.int64] | None, network: "ServedModel",
) -> "Evaluation":  # fmt: skip
    """The figures for the network's task. `lists`: the number of each document's list."""
    from isobatch.cluster import evaluation as evaluating

    task, blocks = task_of(network), network.num_blocks
    if task.by_label:
        return evaluating.evaluated_labels(full, exits, truth, blocks)
    tolerance = network.ramps.rules.tolerance or 0.0
    if isinstance(task, Keypoints):
        return evaluating.evaluated_points(full, exits, truth, blocks, task, tolerance)
    if task.by_map:
        return evaluating.evaluated_pixels(full, exits, truth, blocks)
    if task.by_token:
        words = words_of(sample, truth, task)
        return evaluating.evaluated_words(full, exits, truth, words, blocks, network.labels)
    if task.by_score:
        return evaluating.evaluated_scores(full, exits, truth, lists, blocks, tolerance, task.numbers)
    return evaluating.evaluated(full, exits, truth, blocks)
