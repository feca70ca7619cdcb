"""`isobatch evaluate`: the quality of a network's answers on new inputs, in full and with exits."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isobatch.cluster.commands import Dtype, KeyVariable, key_headers, server_at
from isobatch.cluster.commands.shared_options import (
    READS,
    DeviceHere,
    Labels,
    ReadingOptions,
    label_names,
    with_options,
)
from isobatch.cluster.load.request_bodies import predicts_at
from isobatch.deployments.prepare.sample import labels_of, sampled, words_of
from isobatch.deployments.tasks import task_of
from isobatch.profiles.errors import UserError


@with_options(reading=ReadingOptions)
def evaluate(
    reading: ReadingOptions,
    model: Annotated[str, typer.Argument(help="Directory, hub id or URL of a checkpoint made by `isobatch prepare`.")],
    data: Annotated[Path, typer.Option(help=f"Inputs on which it was not prepared, labelled or not: {READS}.")],
    url: Annotated[
        str | None, typer.Option(help="Take the answers with exits from this server, which runs the same network.")
    ] = None,
    api_key_variable: KeyVariable = None,
    labels: Labels = None,
    max_rows: Annotated[int, typer.Option(min=1, help="The most rows; more are sampled uniformly.")] = 2000,
    device: DeviceHere = "auto",
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Precision of the network; if not given, the one for which its ramps were made."),
    ] = None,
    seed: Annotated[int, typer.Option(help="For the sample.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> None:
    """Measure accuracy, macro-F1, MCC and recall, in full and with exits, agreement and depth, with 95 % intervals.

    Example: [bold]isobatch evaluate my-bert-ee --data fresh.csv --dtype bfloat16[/]
    """

    from isobatch.cluster import evaluation as evaluating
    from isobatch.deployments.models import checkpoint
    from isobatch.deployments.prepare.report import class_table, warnings

    server = predicts_at(server_at(url)) if url else None
    key = key_headers(api_key_variable)
    located = checkpoint.locate(model)
    console = Console(soft_wrap=True, stderr=as_json, markup=False)
    sample = sampled(reading.rows_for(located, console, data), max_rows, seed)
    network = evaluating.loaded(located, device, dtype)  # after the data, so that a wrong file is reported at once
    if not network.ramp_blocks and not server:
        raise UserError(f"{model} has no ramps: make some with 'isobatch prepare'")
    names, task = label_names(network.labels, labels, reading.label_separator), task_of(network)
    truth, values = labels_of(sample, data, names, task), [row.value for row in sample]
    if server:  # the server comes first, so that a wrong URL is reported before anything is computed
        exits = evaluating.served(server, values, key, task, network.labels)
        evaluating.check_same_network(server, exits, network)
    else:
        exits = evaluating.answered(network, values)
    full = evaluating.answered(network, values, exits=False)
    if task.by_label:
        evaluation = evaluating.evaluated_labels(full, exits, truth, network.num_blocks)
    elif task.by_pixel:
        evaluation = evaluating.evaluated_pixels(full, exits, truth, network.num_blocks)
    elif task.by_token:
        words = words_of(sample, truth, task)
        evaluation = evaluating.evaluated_words(full, exits, truth, words, network.num_blocks, network.labels)
    else:
        evaluation = evaluating.evaluated(full, exits, truth, network.num_blocks)
    if as_json:
        print(evaluation.as_json())
        return
    console.print(evaluating.table(evaluation))
    if (promise := network.ramps.rules.promise) and (sentence := evaluating.promise_kept(promise, evaluation)):
        console.print(sentence, style="yellow", highlight=False)
    if evaluation.classes:
        console.print(class_table(evaluation.classes, network.labels, task.answered))
        for warning in warnings(evaluation.classes, network.labels, task=task):
            console.print(warning, style="yellow", highlight=False)
