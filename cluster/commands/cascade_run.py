"""Runs `isobatch cascade`: times all networks, tries their combinations, and writes the best one."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isobatch.cluster.cascades import Contender, Tryout, best, order_notes, timed_candidate
from isobatch.cluster.commands import Metric, check_not_replaced, number_text, policy_path, share
from isobatch.cluster.commands.shared_options import ReadingOptions, label_names
from isobatch.cluster.profiling.block_times import untrained
from isobatch.deployments.folders import PLAN, PROFILE, ramps_of, weights_of
from isobatch.deployments.models import checkpoint
from isobatch.deployments.models.backends import compute_with
from isobatch.deployments.models.cascade_loading import check_policy, order_of
from isobatch.deployments.models.levels import is_cascade
from isobatch.deployments.models.ramps import ExitRules, Ramps, check_answers, made_from
from isobatch.deployments.prepare.cascades import Candidate, ComparisonTerms, candidate, write_cascade
from isobatch.deployments.prepare.data import Row, name_of, naming_rows
from isobatch.deployments.prepare.data import rows as rows_of
from isobatch.deployments.prepare.pipeline import check_free
from isobatch.deployments.prepare.sample import Sample, draw, sampled
from isobatch.deployments.progress import busy, show
from isobatch.deployments.tasks import CLASSIFICATION
from isobatch.profiles.devices import Device, fleet
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import save, write_whole

if TYPE_CHECKING:
    from isobatch.cluster.commands.cascade import CascadeOptions

RATE_SHARE = 0.8  # the load for which latencies are shown, as a share of the rate that the last network alone sustains
COLUMNS = (
    "right\n%", "agrees\n%", "lost\n%", "mean\nms", "p99\nms", "goodput\n/s", "$ per\nmillion", "levels\n%",
)  # fmt: skip
LENGTH_ROWS = 1000  # from which the lengths of texts are estimated


def run(options: "CascadeOptions", reading: ReadingOptions) -> None:
    policy = policy_path(options.policy)
    ramps = Ramps(ExitRules(policy=policy))
    check_answers(ramps.policy, "--policy")
    check_policy(ramps, "--policy")
    metric: Metric = options.metric or "accuracy"
    if metric not in CLASSIFICATION.metrics:
        others = ", ".join(CLASSIFICATION.metrics)
        raise UserError(f"--metric {metric} is not for cascades, whose networks give one label: {others} are")
    check_free(options.out, options.force)
    kinds, max_loss = fleet(options.devices), share(options.max_accuracy_loss)
    folders, console, data = _folders(options.models), Console(soft_wrap=True, markup=False), options.data
    check_not_replaced(options.out, *(folder / "config.json" for folder in folders), data)
    rows = _rows(console, reading, data, folders)
    names = label_names(folders[-1], options.labels)
    sample = draw(show(rows, f"reading {data.resolve().name}"), data, names, options.max_rows, options.seed)
    if sample.labels is None:
        if options.metric not in (None, "agreement"):
            raise UserError(f"{data}: has no column of labels, which --metric {metric} needs (see --label-column)")
        promised = "agreement with the last network is promised"
        console.print(f"{data} has no column of labels (see --label-column): {promised}")
        metric = "agreement"
    by_name = dict(zip(display_names(options.models, folders), folders, strict=True))
    with naming_rows(data, sample.rows):
        candidates = [
            candidate(folder, name, sample, names.names, options.device)
            for name, folder in show([*by_name.items()], "networks")
        ]
    truth, shape = _truth(sample, candidates), np.concatenate((sample.parts.train, sample.parts.calibrate))
    terms = ComparisonTerms(truth, shape, sample.parts.test, policy, metric, max_loss, options.confidence)
    trial = _trial(console, options, candidates, sample, terms, kinds)
    chosen = _chosen(console, trial, options.levels)
    with busy("simulating plans"):
        taken = trial.with_simulated_plan(chosen)
    notes: dict[str, str | int | float] = {"data": name_of(data), "rows": len(sample), "seed": options.seed}
    _write(console, options.out, taken, policy, notes, options.force)


def _rows(console: Console, reading: ReadingOptions, data: Path, folders: Sequence[Path]) -> Iterable[Row]:
    """The rows of a file on which no ramps of these networks were trained: the promise is tested on some of them."""
    channels = checkpoint.channels_of(folders[-1])
    chosen: Iterable[Row] = reading.rows(console, data, channels, pairs=True)
    if not (prepared := [folder for folder in folders if made_from(folder, data)]):
        return chosen
    every = partial(rows_of, data, reading.data_columns, channels=channels)
    numbers = set.intersection(*({row.number for row in untrained(every(), each, data)[0]} for each in prepared))
    left = f"ramps were trained on other rows of {data.name}, which are left out: {len(numbers):,} rows remain"
    console.print(left, style="yellow", highlight=False)
    return (row for row in chosen if row.number in numbers)


def _folders(models: list[str]) -> list[Path]:
    """The checkpoints, all with the same labels and kind of input; they are checked before anything is computed."""
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


def _truth(sample: Sample, candidates: list[Candidate]) -> torch.Tensor:
    """The right answers. Without labels, the last network's answers count as right."""
    head = candidates[-1].head
    right = head.argmax(dim=1) if sample.labels is None else torch.from_numpy(sample.labels)
    return torch.nn.functional.one_hot(right, head.shape[1]).float()


def _trial(
    console: Console, options: "CascadeOptions", candidates: list[Candidate], sample: Sample, terms: ComparisonTerms,
    kinds: tuple[Device, ...],
) -> Tryout:  # fmt: skip
    compute_with(options.threads)
    recorded, names = sampled(sample.values, LENGTH_ROWS), [kind.kind for kind in kinds]
    timing = (recorded, names, options.device, options.timing_s, options.largest)
    with busy("timing the networks"):
        timed, notes = zip(*(timed_candidate(each, *timing) for each in candidates), strict=True)
    order = order_notes([each.name for each in candidates], [sum(each.costs) for each in timed])
    for note in chain(chain.from_iterable(notes), order):
        console.print(note, highlight=False)
    tested = [sample.values[row] for row in sample.parts.test]
    return Tryout(candidates, timed, [each.tokens(tested) for each in timed], terms, kinds, options.slo_ms / 1e3)


def _chosen(console: Console, trial: Tryout, levels: int) -> Contender:
    """Try all combinations, print them, and take the best that passes the test."""
    combinations = trial.combinations(levels)
    rows = [trial.row(each) for each in show(combinations, "planning")]
    last = next(row for row in rows if row.made.alone)
    rate = RATE_SHARE * (last.goodput_per_s or max(row.goodput_per_s for row in rows) or 1.0)
    latencies = [trial.latency(row, rate) for row in show(rows, "simulating")]
    console.print(table(rows, latencies, rate))
    with busy("testing the best"):
        taken = trial.tested(rows, combinations)
    if taken.name != (first := best(rows)).name:
        why = "on rows from which nothing was chosen it breaks its promise, or gains nothing: more rows may help"
        console.print(f"not taken: {first.name}: {why}", style="yellow", highlight=False)
    return taken


def _write(
    console: Console, out: Path, taken: Contender, policy: str, notes: dict[str, str | int | float], force: bool
) -> None:
    rules = write_cascade(out, taken.made, taken.chosen, policy, notes, force)
    profile = replace(taken.profile, model=out.name, weights=weights_of(out), ramps=ramps_of(out))
    save(profile, out / PROFILE)
    assert taken.plan, "This is a bug: a combination without a plan is never taken."
    plan = replace(taken.plan, model=profile.model, weights=profile.weights)
    write_whole(out / PLAN, plan.to_json())
    console.print(sentence(taken, rules), highlight=False)
    console.print(f"written to {out}, with its {PLAN} and {PROFILE}: serve it as any other model", highlight=False)


def table(rows: Sequence[Contender], latencies: Sequence[tuple[float, float] | None], rate_per_s: float) -> Table:
    title = f"latencies at {number_text(rate_per_s)} inputs/s; goodput and cost at full load, within the deadline"
    caption = "right, and the last network's answer; lost against it alone (!: more than can be promised)"
    result = Table(title=title, caption=caption, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    result.title_justify = result.caption_justify = "left"
    result.add_column("network")
    for heading in COLUMNS:
        result.add_column(heading, justify="right", no_wrap=True)
    for row, latency in zip(rows, latencies, strict=True):
        result.add_row(Text(row.name), *_cells(row, latency))
    return result


def _cells(row: Contender, latency: tuple[float, float] | None) -> tuple[str, ...]:
    figures, dollars = row.figures, row.dollars_per_million
    return (
        f"{100 * figures.accuracy:.1f}",
        f"{100 * figures.agreement:.1f}",
        f"{100 * figures.lost:+.2f}" + ("" if row.hopeful else "!"),
        "-" if latency is None else f"{1e3 * latency[0]:.3g}",
        "-" if latency is None else f"{1e3 * latency[1]:.3g}",
        number_text(row.goodput_per_s) if row.plan else "late",
        f"{dollars:.3g}" if isfinite(dollars) else "-",
        "/".join(f"{100 * share:.0f}" for share in row.shares),
    )


def sentence(row: Contender, rules: ExitRules) -> str:
    """The combination that is written, and its promise, as text."""
    weights = "".join(f", weight {weight:g}" for weight in row.made.weights[1:])
    shares = " / ".join(f"{share:.1%}" for share in row.shares)
    answered = f"; its levels answer {shares}{weights}" if len(row.made.members) > 1 else ""
    promised = str(rules.promise) if rules.promise else "nothing is promised: too few inputs to test it on"
    return f"taken: {row.name}: {number_text(row.goodput_per_s)} inputs/s{answered}\n{promised}"
