"""`isobatch prepare`: a network of Hugging Face, a classifier or a decoder, becomes an early-exit one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from isobatch.cluster.commands import METRICS, Dtype, Metric, check_not_replaced, policy_path, share, share_cores
from isobatch.cluster.commands.shared_options import (
    MOST_SEED,
    READS,
    DeviceHere,
    Labels,
    Queries,
    ReadingOptions,
    TextFileOptions,
    check_not_given,
    check_only,
    check_unread,
    label_names,
    with_options,
)
from isobatch.deployments.folders import hash_of_data, replacing
from isobatch.deployments.map_tasks import KEYPOINTS, PIXELS
from isobatch.deployments.prepare.data import name_of, naming_rows
from isobatch.deployments.prepare.sample import draw, sampled
from isobatch.deployments.progress import show
from isobatch.deployments.tasks import LABELS
from isobatch.profiles.errors import UserError, read_model
from isobatch.profiles.losses import ABSOLUTE_ERROR, MEAN_IOU, MICRO_F1, NDCG
from isobatch.profiles.promise import RULES

if TYPE_CHECKING:
    from torch import nn

    from isobatch.deployments.prepare.pipeline import OwnHeads
    from isobatch.deployments.tasks import Task

Kind = Literal["light", "pooler"]
BY_ANSWER = {LABELS.name: ", label by label", PIXELS.name: ", pixel by pixel", KEYPOINTS.name: ", point by point"}
MAX_TOKENS = 64  # written after each prompt, unless --max-tokens is given


@dataclass(frozen=True, kw_only=True)
class _CommonOptions:
    model: Annotated[str, typer.Argument(help="Directory, hub id or URL (hf, s3, gs) of a classifier or a decoder.")]
    data: Annotated[Path, f"Inputs, labelled or not: {READS}."]
    out: Annotated[Path, "Directory to write: the checkpoint, its ramps and exits.json."]
    max_accuracy_loss: Annotated[str, "What other inputs may lose against the full network."] = "1%"
    max_rows: Annotated[int, typer.Option(min=50, help="Use a uniform sample of at most this many rows.")] = 20_000
    dtype: Annotated[
        Dtype | None,
        "The precision that will be served: ramps and thresholds are made for it; none: float32, or for a classifier "
        "on a GPU that of the checkpoint.",
    ] = None
    device: DeviceHere = "auto"
    force: Annotated[bool, "Replace OUT if it is a prepared model."] = False


@dataclass(frozen=True, kw_only=True)
class ClassifierPrepareOptions(ReadingOptions, _CommonOptions):
    ramp: Annotated[Kind, "light (one linear layer) or pooler (DeeBERT's: dense, tanh, linear)."] = "light"
    own_exits: Annotated[bool, "The network has exits (DeeBERT's, PABEE's, ElasticBERT's): they become ramps."] = False
    exit_names: Annotated[Path | None, "A JSON file with the names of other exits (docs/prepare.md)."] = None
    policy: Annotated[
        str | None,
        typer.Option(
            help="When an input leaves: a name in isobatch.deployments.exits or module:function.",
            show_default="entropy, of points five_best",
        ),
    ] = None
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="The probability that other inputs lose no more.")
    ] = 0.95
    metric: Annotated[
        Metric | None, typer.Option(help=f"What may be lost: {METRICS}.", show_default="by what the network gives")
    ] = None
    queries: Queries = False
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Two scores count as the same if they differ by at most this share of their range, two points if they "
            "are apart by at most this share of the picture's longer side.",
        ),
    ] = 0.05
    labels: Labels = None
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="For the sample, its parts and the training.")] = 0


@dataclass(frozen=True, kw_only=True)
class DecoderPrepareOptions(TextFileOptions, _CommonOptions):
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"For a decoder: tokens to write after each text; {MAX_TOKENS} if not given."),
    ] = None


@with_options(classifier=ClassifierPrepareOptions, decoder=DecoderPrepareOptions)
def prepare(classifier: ClassifierPrepareOptions, decoder: DecoderPrepareOptions) -> None:
    """Give a network early exits, without touching its weights.

    The promise for other inputs is tested on a third of the rows, which are used for nothing else: thresholds are
    loosened step by step until the test fails. With too few rows nothing is promised, and no input leaves early.

    For a network that labels words, data are CoNLL files (a word and its label a line) or lists of words and labels.

    For a decoder, data are prompts, which it continues or which its encoder reads (T5). Its ramp is its own head, read
    after the block where that gains most; --max-accuracy-loss is the share of tokens that may differ from the full
    network's.

    Example: [bold]isobatch prepare my-bert --data reviews.csv --out my-bert-ee --max-accuracy-loss 1%[/]

    For half precision: [bold]isobatch prepare my-bert --data reviews.csv --out my-bert-ee --dtype bfloat16[/]
    """
    share_cores()
    from isobatch.deployments.decoding.ramp_rules import check_if_decoder, is_decoder
    from isobatch.deployments.models import checkpoint
    from isobatch.deployments.prepare import pipeline

    loss = share(classifier.max_accuracy_loss)
    pipeline.check_free(classifier.out, classifier.force)
    source = checkpoint.locate(classifier.model, check_if_decoder)
    check_not_replaced(classifier.out, source, classifier.data)
    if is_decoder(source):
        refusal = "is for classifiers: a decoder's ramp is its own head, read early"
        check_only(DecoderPrepareOptions, classifier, refusal)
        _prepare_decoder(decoder, source, loss)
    else:
        check_only(ClassifierPrepareOptions, decoder, "is for decoders: this network is not one")
        if classifier.own_exits or classifier.exit_names:
            _prepare_own(classifier, source, loss)
        else:
            _prepare_classifier(classifier, source, loss)


def _prepare_own(options: ClassifierPrepareOptions, source: Path, loss: float) -> None:
    """A network that was trained with exits."""
    from isobatch.deployments.prepare.own_exits import OwnExits, heads_of, names_in, without_exits

    own = read_model(options.exit_names, OwnExits) if options.exit_names else names_in(source)
    other = options.ramp == "pooler" and own.kind != "pooler"
    check_unread({"--ramp pooler": other}, "is not for a network whose own exits are light: leave it out")
    with TemporaryDirectory(prefix="isobatch-exits-") as folder:
        weights = without_exits(source, own, Path(folder))

        def heads(widths: Sequence[int], num_labels: int) -> Mapping[int, "nn.Module"]:
            made = heads_of(own, weights, widths, num_labels)
            blocks, trained = ", ".join(map(str, made)), len(widths) - 1 - len(made)
            others = f"; {trained} other ramps are trained" if trained else ""
            print(f"the network's own exits after blocks {blocks} become ramps as they are{others}")
            return made

        try:
            _prepare_classifier(
                replace(options, ramp="pooler" if own.kind == "pooler" else "light"), Path(folder), loss, heads
            )
        except UserError as error:
            raise UserError(str(error).replace(folder, str(source))) from error


def _prepare_classifier(
    options: ClassifierPrepareOptions, source: Path, loss: float, own: "OwnHeads | None" = None
) -> None:
    from isobatch.deployments.models import checkpoint
    from isobatch.deployments.models.loading import resolve_device
    from isobatch.deployments.models.ramps import check_answers, check_forgets, policy_at
    from isobatch.deployments.prepare import pipeline, report
    from isobatch.deployments.prepare.measuring import PrepareOptions

    data, out = options.data, options.out
    checkpoint.check(source)
    task = checkpoint.task_at(source)
    policy = policy_path(options.policy or task.policy)
    rule = policy_at(policy)
    _check_scores(options, task)
    if not task.by_score:
        check_answers(rule, "--policy", task)
    metric = _metric_of(options, task)
    if task.several:
        check_forgets(rule, "--policy")
    if task.by_map and (own or options.ramp != "light"):
        raise UserError("--ramp and --own-exits are not for a network whose answers are maps: its exits have bridges")
    names = label_names(source, options.labels, options.label_separator)
    console = Console(markup=False)
    inputs = show(options.rows_for(source, console, data), f"reading {data.resolve().name}")
    sample = draw(inputs, data, names, options.max_rows, options.seed, task, options.queries)
    if sample.labels is None:
        if options.metric not in (None, "agreement"):
            raise UserError(f"{data}: has no column of labels, which --metric {metric} needs (see --label-column)")
        console.print(
            f"{data} has no column of labels: ramps learn what the network itself predicts (see --label-column), "
            f"and agreement with it is promised{BY_ANSWER.get(task.name, '')}"
        )
        metric = "agreement"
    dtype = options.dtype or checkpoint.usual_dtype(source, resolve_device(options.device))
    preparation = PrepareOptions(
        policy, options.ramp, dtype, loss, options.confidence, metric, options.seed,
        tolerance=options.tolerance,
    )  # fmt: skip
    named: dict[str, str | int | float] = {"checkpoint": name_of(Path(options.model)), "data": name_of(data)}
    notes = named | {"rows": len(sample)}
    if sample.lists is None:  # `isobatch profile` then finds the rows that no ramp was trained on
        notes["data_hash"] = hash_of_data(data)
    with naming_rows(data, sample.rows):
        rules = pipeline.prepare(source, sample, out, preparation, notes, options.device, options.force, own)
    console.print(report.exit_table(rules, task.choices(len(checkpoint.label_names(source)))))
    if rules.promise and rules.mean_depth_share != 1.0:  # otherwise `advice` says that no input leaves early
        console.print(report.promise_text(rules.promise), highlight=False)
    if sample.labels is not None and rules.classes and not task.by_score:
        console.print(report.class_table(rules.classes, names.names, task.answered, rules.entities))
    of_classes = () if task.by_score else report.warnings(rules.classes, names.names, sample.labels is not None, task)
    counted = rules.promise and rules.promise.counted and metric not in (MICRO_F1, NDCG)
    rare = report.unseen(rules.classes, names.names) if counted else None
    cut = rules.notes.get(pipeline.CUT)
    remarks = cut, report.copies(sample), report.advice(rules), report.outdone(rules), *of_classes, rare
    for sentence in filter(None, remarks):
        console.print(sentence, style="yellow", highlight=False)
    picture = f"the picture is {out / pipeline.PICTURE}"
    console.print(f"written to {out}: a Hugging Face checkpoint with ramps; {picture}", soft_wrap=True)


def _metric_of(options: ClassifierPrepareOptions, task: "Task") -> Metric:
    metric: Metric = options.metric or (NDCG if options.queries else task.metrics[0])
    if metric not in task.metrics:
        gives = {MICRO_F1: "several labels", MEAN_IOU: "a map", ABSOLUTE_ERROR: "a score", NDCG: "a score"}
        needed, others = gives.get(metric, "one label"), ", ".join(task.metrics)
        raise UserError(f"--metric {metric} is for networks that give an input {needed}; for this one: {others}")
    return metric


def _check_scores(options: ClassifierPrepareOptions, task: "Task") -> None:
    """Raise UserError for options that a network with a score does not have, or that only such a network has."""
    if not task.by_score:
        of_one = "is for networks with one output, the score of a query and a document"
        check_unread({"--queries": options.queries}, of_one)
        if task.name != KEYPOINTS.name:
            check_not_given(options, ("tolerance",), "is for networks that give scores or points: leave it out")
        return
    own = options.own_exits or options.exit_names is not None
    given = {"--policy": options.policy is not None, "--own-exits": own, "--labels": options.labels is not None}
    given["--ramp pooler"] = options.ramp == "pooler"
    check_unread(given, "is for networks that give labels: this one has one output, a score")
    if options.metric == NDCG and not options.queries:
        raise UserError(f"--metric {NDCG} needs --queries: data with lists of documents (docs/prepare.md)")


def _prepare_decoder(options: DecoderPrepareOptions, source: Path, loss: float) -> None:
    """Write the checkpoint with the rules of its ramp."""
    from isobatch.deployments.decoding.ramp_rules import check_decoder
    from isobatch.deployments.models.checkpoint import copy
    from isobatch.deployments.prepare.decoder import ramp_report
    from isobatch.deployments.prepare.pipeline import check_free

    dtype = options.dtype or "float32"
    if dtype == "int8":
        raise UserError("--dtype int8 is for classifiers: a decoder is served in float32, float16 or bfloat16")
    check_decoder(source)
    console, data = Console(markup=False), options.data
    values = (row.value for row in options.rows(console, data, channels=None, pairs=False))
    prompts = sampled((value if isinstance(value, str) else " ".join(value) for value in values), options.max_rows)
    Random(0).shuffle(prompts)  # some choose the threshold and others test it, and files are often sorted
    report = ramp_report(source, prompts, options.max_tokens or MAX_TOKENS, dtype, loss, options.device)
    notes = {"checkpoint": name_of(Path(options.model)), "data": name_of(data)}
    rules = report.rules.model_copy(update={"dtype": dtype, "notes": notes})
    check_free(options.out, options.force)  # once more: another command may have written it meanwhile
    with replacing(options.out) as draft:
        copy(source, draft)
        rules.write(draft / RULES)
    console.print(str(report), highlight=False, soft_wrap=True)
    if report.left_out:
        console.print(report.left_out, style="yellow", highlight=False, soft_wrap=True)
    console.print(f"written to {options.out}: a Hugging Face checkpoint with a ramp; isobatch serve {options.out}")
