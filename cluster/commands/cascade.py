"""`isobatch cascade`: combines small and large networks, so that the large ones run only for difficult inputs."""

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isobatch.cluster.commands import METRICS, Metric
from isobatch.cluster.commands.prepare import share
from isobatch.cluster.commands.shared_options import READS, Labels, ReadingOptions, label_names, with_options
from isobatch.deployments.folders import PLAN, PROFILE
from isobatch.profiles.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    from isobatch.cluster.cascades.contenders import Contender, Tryout
    from isobatch.deployments.prepare.cascades import Candidate, ComparisonTerms
    from isobatch.deployments.prepare.data import Columns
    from isobatch.deployments.prepare.sample import Sample
    from isobatch.profiles.devices import Device

RATE_SHARE = 0.8  # the load for which latencies are shown, as a share of the rate that the last network alone sustains
LENGTH_ROWS = 1000  # from which the lengths of texts are estimated


@with_options(reading=ReadingOptions)
def cascade(
    reading: ReadingOptions,
    models: Annotated[
        list[str], typer.Argument(help="Directories or hub ids, from the smallest to the largest; prepared or not.")
    ],
    data: Annotated[Path, typer.Option(help=f"Inputs, labelled or not, on which no network was trained: {READS}.")],
    out: Annotated[Path, typer.Option(help="Directory to write the best combination to.")],
    devices: Annotated[str, typer.Option(help="The fleet, as in cpu=2 or v100=6,k80=15@0.45 (dollars per hour).")],
    slo_ms: Annotated[float, typer.Option(help="The deadline that plans must keep.")] = 1000.0,
    max_accuracy_loss: Annotated[
        str, typer.Option(help="The most that may be lost compared with the last network alone.")
    ] = "1%",
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="The confidence with which the loss is tested.")
    ] = 0.95,
    metric: Annotated[Metric, typer.Option(help=f"What the loss is measured by: {METRICS}.")] = "accuracy",
    policy: Annotated[
        str, typer.Option(help="Which inputs are answered early: entropy, confidence, margin, or module:function.")
    ] = "entropy",
    levels: Annotated[int, typer.Option(min=1, max=4, help="The most networks in a cascade.")] = 2,
    labels: Labels = None,
    max_rows: Annotated[int, typer.Option(min=50, help="The most rows; more are sampled uniformly.")] = 20_000,
    device: Annotated[str, typer.Option(help="Where networks run over the data: auto, cpu, cuda:0.")] = "auto",
    budget: Annotated[float, typer.Option(min=0.1, help="Seconds of timing for each network.")] = 20.0,
    largest: Annotated[int, typer.Option(min=1, help="The largest batch to measure.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="Host threads; a Ray replica has one for each of its CPUs.")] = 1,
    seed: Annotated[int, typer.Option(help="For the sample and its parts.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is a prepared model.")] = False,
) -> None:
    """Combine small and large networks, and write the combination that serves most within the allowed loss.

    Each network runs once over the data. Each network alone, each with its exits, and all their cascades are planned
    for the fleet and simulated. The combination that serves most is tested on rows from which nothing was chosen.

    Example: [bold]isobatch cascade my-minilm my-bert --data reviews.csv --devices cpu=4 --slo-ms 200 --out both[/]
    """
    from rich.console import Console

    from isobatch.cluster.commands import above_0
    from isobatch.deployments.models.cascade_loading import check_policy
    from isobatch.deployments.models.ramps import ExitRules, Ramps
    from isobatch.deployments.prepare.pipeline import check_free
    from isobatch.profiles.devices import fleet

    above_0("--slo-ms", slo_ms)
    path = policy if ":" in policy else f"isobatch.deployments.exits:{policy}"
    check_policy(Ramps(ExitRules(policy=path)), "--policy")
    check_free(out, force)
    kinds, allowed_loss = fleet(devices), share(max_accuracy_loss)
    folders, console = _folders(models), Console(soft_wrap=True, markup=False)
    sample = _sample(console, folders[-1], data, reading.data_columns, labels, max_rows, seed)
    if sample.labels is None:
        metric = _without_labels(console, data, metric)
    terms = partial(_terms, sample, path, metric, allowed_loss, confidence)
    by_name = dict(zip(display_names(models, folders), folders, strict=True))
    trial = _trial(console, by_name, sample, terms, kinds, slo_ms / 1e3, device, threads, budget, largest)
    chosen = _chosen(console, trial, levels)
    with console.status("simulating plans"):
        taken = trial.with_simulated_plan(chosen)
    notes: dict[str, str | int | float] = {"data": data.name, "rows": len(sample), "seed": seed}
    _write(console, out, taken, path, notes, force)


def _folders(models: list[str]) -> list[Path]:
    """The checkpoints, all with the same labels and kind of input; they are checked before anything is computed."""
    from isobatch.deployments.models import checkpoint
    from isobatch.deployments.models.cascade_loading import order_of
    from isobatch.deployments.models.levels import is_cascade

    if len(models) < 2:
        raise UserError("a cascade needs two networks or more, from the smallest to the largest")
    folders = [checkpoint.locate(model) for model in models]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a network is named twice: give each once, from the smallest to the largest")
    for folder in folders:
        if is_cascade(folder):
            raise UserError(f"{folder}: is a cascade already: give the networks that it was made of")
        checkpoint.check_level(folder)
        order_of(checkpoint.label_names(folder), checkpoint.label_names(folders[-1]), folder)
    if len({checkpoint.reads_images(folder) for folder in folders}) > 1:
        raise UserError("some of these networks read texts and some images: a cascade needs one kind")
    return folders


def display_names(models: list[str], folders: list[Path]) -> list[str]:
    """The names of networks in tables and files: the last part of the user's name, if these differ. The directories of
    networks from the hub are no help, because they are named by commits.

    >>> display_names(["me/small", "runs/large"], [Path("snapshots/0f3a"), Path("runs/large")])
    ['small', 'large']
    >>> display_names(["a/best", "b/best"], [Path("a/best"), Path("b/best")])
    ['a/best', 'b/best']
    """
    names = [Path(model).name or folder.resolve().name for model, folder in zip(models, folders, strict=True)]
    return names if len(set(names)) == len(names) else models


def _sample(
    console: "Console", last: Path, data: Path, columns: "Columns", labels: str | None, max_rows: int, seed: int
) -> "Sample":
    from isobatch.deployments.models import checkpoint
    from isobatch.deployments.prepare.data import rows, taken
    from isobatch.deployments.prepare.sample import draw
    from isobatch.deployments.progress import show

    channels = checkpoint.channels_of(last)
    console.print(taken(data, columns, channels=channels), highlight=False)
    names = label_names(checkpoint.label_names(last), labels)
    return draw(show(rows(data, columns, channels=channels), f"reading {data.name}"), data, names, max_rows, seed)


def _without_labels(console: "Console", data: Path, metric: Metric) -> Metric:
    if metric not in ("accuracy", "agreement"):
        raise UserError(f"{data}: has no column of labels, which --metric {metric} needs (see --label-column)")
    console.print(f"{data} has no column of labels (see --label-column): agreement with the last network is promised")
    return "agreement"


def _terms(
    sample: "Sample", policy: str, metric: Metric, allowed_loss: float, confidence: float, candidates: "list[Candidate]"
) -> "ComparisonTerms":
    """The terms of the test. Without labels, the last network's answers count as right."""
    import numpy as np
    import torch

    from isobatch.deployments.prepare.cascades import ComparisonTerms

    head = candidates[-1].head
    right = head.argmax(dim=1) if sample.labels is None else torch.from_numpy(sample.labels)
    truth = torch.nn.functional.one_hot(right, head.shape[1]).float()
    shape = np.concatenate((sample.parts.train, sample.parts.calibrate))
    return ComparisonTerms(truth, shape, sample.parts.test, policy, metric, allowed_loss, confidence)


def _trial(
    console: "Console", folders: "Mapping[str, Path]", sample: "Sample",
    terms: "Callable[[list[Candidate]], ComparisonTerms]",
    kinds: "tuple[Device, ...]", slo_s: float, device: str, threads: int, budget: float, largest: int,
) -> "Tryout":  # fmt: skip
    """Run every network over the data, then time it."""
    import torch

    from isobatch.cluster.cascades.contenders import Tryout
    from isobatch.cluster.cascades.timing import timed_candidate
    from isobatch.deployments.models import checkpoint
    from isobatch.deployments.prepare.cascades import candidate
    from isobatch.deployments.progress import show

    labels = checkpoint.label_names([*folders.values()][-1])
    networks = show([*folders.items()], "networks")
    candidates = [candidate(folder, name, sample, labels, device) for name, folder in networks]
    torch.set_num_threads(threads)
    recorded, kind_names = sample.values[:LENGTH_ROWS], [kind.kind for kind in kinds]
    timed, notes = zip(
        *(timed_candidate(each, recorded, kind_names, device, budget, largest) for each in candidates), strict=True
    )
    for note in chain.from_iterable(notes):
        console.print(note, highlight=False)
    tested = [sample.values[row] for row in sample.parts.test]
    return Tryout(candidates, timed, [each.tokens(tested) for each in timed], terms(candidates), kinds, slo_s)


def _chosen(console: "Console", trial: "Tryout", levels: int) -> "Contender":
    """Try all combinations, print them, and take the best that passes the test."""
    from isobatch.cluster.cascades.report import table
    from isobatch.deployments.progress import show

    combinations = trial.combinations(levels)
    rows = [trial.row(each) for each in show(combinations, "planning")]
    last = next(row for row in rows if row.made.alone)
    rate = RATE_SHARE * (last.goodput_per_s or max(row.goodput_per_s for row in rows) or 1.0)
    latencies = [trial.latency(row, rate) for row in show(rows, "simulating")]
    console.print(table(rows, latencies, rate))
    return trial.tested(rows, combinations)


def _write(
    console: "Console", out: Path, taken: "Contender", policy: str, notes: "dict[str, str | int | float]", force: bool
) -> None:
    from isobatch.cluster.cascades import report
    from isobatch.deployments.folders import weights_of
    from isobatch.deployments.prepare.cascades import write_cascade
    from isobatch.profiles.files import save

    rules = write_cascade(out, taken.made, taken.chosen, policy, notes, force)
    profile = replace(taken.profile, model=out.name, weights=weights_of(out))
    save(profile, out / PROFILE)
    assert taken.plan, "This is a bug: a combination without a plan is never taken."
    plan = replace(taken.plan, model=profile.model, weights=profile.weights)
    (out / PLAN).write_text(plan.to_json() + "\n")
    console.print(report.taken(taken, rules), highlight=False)
    console.print(f"written to {out}, with its {PLAN} and {PROFILE}: serve it as any other model", highlight=False)
