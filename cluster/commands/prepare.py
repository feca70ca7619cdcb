"""`isobatch prepare`: a Hugging Face classifier becomes an early-exit one."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cluster.commands import METRICS, Dtype, Metric
from cluster.commands.reading import (
    READS,
    Delimiter,
    Encoding,
    Header,
    ImageColumn,
    LabelColumn,
    Labels,
    PairColumn,
    TextColumn,
    columns_of,
    label_names,
)
from profiles.errors import UserError

if TYPE_CHECKING:
    from deployments.exits import Policy

Kind = Literal["light", "pooler"]


def prepare(
    model: Annotated[str, typer.Argument(help="Directory or hub id of a Hugging Face classifier, or of a decoder.")],
    data: Annotated[Path, typer.Option(help=f"Inputs, labelled or not: {READS}.")],
    out: Annotated[Path, typer.Option(help="Directory to write: the checkpoint, its ramps and exits.json.")],
    ramp: Annotated[
        Kind, typer.Option(help="light (one linear layer) or pooler (DeeBERT's: dense, tanh, linear).")
    ] = "light",
    policy: Annotated[
        str, typer.Option(help="Who leaves: a name in deployments.exits or module:function.")
    ] = "entropy",
    max_accuracy_loss: Annotated[str, typer.Option(help="What other inputs may lose against the full network.")] = "1%",
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="How sure it must be that they lose no more.")
    ] = 0.95,
    metric: Annotated[Metric, typer.Option(help=f"What may be lost: {METRICS}.")] = "accuracy",
    text_column: TextColumn = None,
    text_pair_column: PairColumn = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    columns: Header = None,
    delimiter: Delimiter = None,
    encoding: Encoding = "utf-8",
    labels: Labels = None,
    max_rows: Annotated[int, typer.Option(min=50, help="Use a uniform sample of at most so many rows.")] = 20_000,
    device: Annotated[str, typer.Option(help="Where features are computed: auto, cpu, cuda:0.")] = "auto",
    dtype: Annotated[
        Dtype, typer.Option(help="The precision that will be served: ramps and thresholds are made for it.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="For the sample, its parts and the training.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a decoder: so many are written after each text; 64 if not given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is a prepared model.")] = False,
) -> None:
    """Give a classifier early exits, without touching its weights.

    What is promised of other inputs is tested on a third of the rows, which nothing is made from: thresholds are
    loosened step by step until the test fails. Too few rows promise nothing, and then nobody leaves early.

    Of a network that labels words, data are CoNLL files (a word and its label a line) or lists of words and labels.

    A decoder's texts are prompts that it writes on from, or that its encoder reads (T5). Its ramp is its own head, read
    where that brings most, and --max-accuracy-loss is the share of tokens that may be others than the full network's.

    Example: [bold]isobatch prepare my-bert --data reviews.csv --out my-bert-ee --max-accuracy-loss 1%[/]

    For a network that is served in halves: [bold]isobatch prepare my-bert --data reviews.csv --out my-bert-ee --dtype
    bfloat16[/]
    """
    from rich.console import Console

    from cluster.commands.prepare_decoder import DecoderCommand
    from deployments.decoding.checkpoint import is_decoder
    from deployments.models import checkpoint
    from deployments.models.ramps import policy_at
    from deployments.prepare import pipeline
    from deployments.prepare.classes import class_table, unseen, warnings
    from deployments.prepare.data import rows, taken
    from deployments.prepare.measuring import PrepareOptions
    from deployments.prepare.report import advice, exit_table, outdone, promised
    from deployments.prepare.sample import draw
    from deployments.progress import show

    path = policy if ":" in policy else f"deployments.exits:{policy}"
    policy_at(path)
    options = PrepareOptions(path, ramp, dtype, share(max_accuracy_loss), confidence, metric, seed)
    pipeline.check_free(out, force)
    source = checkpoint.locate(model)
    wanted = columns_of(text_column, text_pair_column, image_column, label_column, columns, delimiter, encoding)
    if is_decoder(source):
        for_classifiers = {
            "--ramp": (ramp, "light"),
            "--policy": (policy, "entropy"),
            "--confidence": (confidence, 0.95),
            "--metric": (metric, "accuracy"),
            "--labels": (labels, None),
            "--label-column": (label_column, None),
            "--image-column": (image_column, None),
            "--text-pair-column": (text_pair_column, None),
            "--device": (device, "auto"),
            "--seed": (seed, 0),
        }
        loss = share(max_accuracy_loss)
        command = DecoderCommand(source, data, out, wanted, loss, max_tokens, max_rows, dtype, for_classifiers, force)
        command.run(Console(markup=False), model)
        return
    if max_tokens is not None:
        raise UserError("--max-tokens is for decoders: this network writes nothing")
    checkpoint.check(source)
    task = checkpoint.task_at(source)
    if task.by_token:
        _check_for_words(metric, policy_at(path))
    channels, names = checkpoint.channels_of(source), label_names(checkpoint.label_names(source), labels)
    console = Console(markup=False)
    pairs = not task.by_token
    console.print(taken(data, wanted, channels=channels, pairs=pairs), highlight=False, soft_wrap=True)
    found = rows(data, wanted, channels=channels, pairs=pairs)
    sample = draw(show(found, f"reading {data.name}"), data, names, max_rows, seed, task)
    if sample.labels is None:
        if metric not in ("accuracy", "agreement"):
            raise UserError(f"{data}: has no column of labels, which --metric {metric} needs (see --label-column)")
        console.print(
            f"{data} has no column of labels: ramps learn what the network itself predicts (see --label-column), "
            "and agreement with it is promised",
        )
        options = replace(options, metric="agreement")
    notes: dict[str, str | int | float] = {"checkpoint": Path(model).name, "data": data.name, "rows": len(sample)}
    rules = pipeline.prepare(source, sample, out, options, notes, device, force)
    console.print(exit_table(rules, len(checkpoint.label_names(source))))
    if rules.promise:
        console.print(promised(rules.promise), highlight=False)
    if sample.labels is not None:
        console.print(class_table(rules.classes, names.names, task.answered, rules.entities))
    told = [
        advice(rules),
        outdone(rules),
        *warnings(rules.classes, names.names, sample.labels is not None, task.answered),
    ]
    if rules.promise and rules.promise.counted:
        told.append(unseen(rules.classes, names.names))
    for said in filter(None, told):
        console.print(said, style="yellow", highlight=False)
    console.print(f"written to {out}: a Hugging Face checkpoint with ramps; the picture is {out / pipeline.PICTURE}")


def _check_for_words(metric: Metric, policy: "Policy") -> None:
    """Refuse what cannot be promised, or decided, where words are answered."""
    from deployments.models.ramps import check_forgets

    if metric not in ("accuracy", "agreement"):
        raise UserError(f"--metric {metric} is for networks that answer an input as a whole, not its words")
    check_forgets(policy, "--policy")


def share(text: str) -> float:
    """
    >>> share("1%"), share("0.02")
    (0.01, 0.02)
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UserError(f"--max-accuracy-loss {text} is no share; write it as 1% or 0.01")
    return value
