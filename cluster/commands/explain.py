"""`isobatch explain`: the gain from each mechanism of a plan, and what would gain more."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from isobatch.cluster.commands import above_0, check_picture, number_text
from isobatch.deployments.progress import show
from isobatch.profiles.devices import links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile, differ, load
from isobatch.profiles.latency import MOST_BATCH
from isobatch.profiles.picture import BLUE, DARK, RED, plain

if TYPE_CHECKING:
    from isobatch.cluster.simulator.explained import Improvement, MechanismStep
    from isobatch.optimizer import Plan, Problem

PADDED_SHARE = 0.9  # texts are padded to a length that this share of them does not exceed


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan, as `isobatch plan --out` wrote it.")],
    profile: Annotated[Path, "The measured times that the plan was made from."],
    slo_ms: Annotated[float | None, "The deadline of every answer; if not given, that of the plan."] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="The largest batch.", show_default="the largest that was timed")
    ] = None,
    one_machine: Annotated[bool, "All devices are in one machine, as in the plan made with this option."] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the steps; '': no picture.", show_default="beside the plan")
    ] = None,
    as_json: Annotated[bool, "Print JSON, for other programs."] = False,
) -> None:
    """Simulate what batches, exits, constant batches, cuts and several kinds bring to a plan, one after the other.

    A mechanism that does not pay on these devices or for these inputs shows a loss. What would bring more is estimated
    by the planner: a longer SLO, a faster link, more memory, another device.

    Example: [bold]isobatch explain plan.json --profile bert.json[/]
    """

    from isobatch.cluster.simulator.explained import changes, steps
    from isobatch.optimizer import Objective, read_plan

    above_0("--slo-ms", slo_ms)
    explained = read_plan(plan)
    if explained.writes_texts:
        raise UserError(f"{plan} is for a network that writes texts: `isobatch simulate` shows what it sustains")
    known = load(profile)
    slo_s = slo_ms / 1e3 if slo_ms else explained.slo_s
    if slo_s is None:
        raise UserError(f"{plan} has no SLO, within which inputs must be answered: give --slo-ms")
    picture = plan.with_name(f"{plan.stem}-steps.png") if picture is None else picture
    if picture.name:
        check_picture(picture)
    facts, padded = _problems(explained, known, one_machine)
    objective = Objective(slo_s=slo_s, max_batch=max_batch or MOST_BATCH)
    all_steps = list(show(steps(explained, facts, objective, padded), "simulating step by step"))
    if not any(each.goodput_per_s for each in all_steps):
        raise UserError(f"no plan keeps the SLO of {1e3 * slo_s:g} ms on these devices: --slo-ms gives a longer one")
    more = changes(facts, objective)
    if picture.name:
        _draw(all_steps, picture)
    if as_json:
        taken = [{"mechanism": each.mechanism, "goodput_per_s": each.goodput_per_s} for each in all_steps]
        print(json.dumps({"schema_version": 1, "steps": taken, "changes": [asdict(each) for each in more]}, indent=2))
        return
    console = Console(highlight=False)
    console.print(_table(all_steps))
    for line in _lines(more):
        console.print(line)
    if picture.name:
        console.print(f"the picture is {picture}", soft_wrap=True, markup=False)


def _lines(more: "list[Improvement]") -> list[str]:
    if not more:
        return ["By the planner's estimates, nothing that it knows would bring 1 % more."]
    head = "What would bring more, by the planner's estimates, each change alone:"
    return [head, *(f"  {each.what}: {each.times - 1:+.0%}" for each in more)]


def _problems(plan: "Plan", profile: Profile, one_machine: bool) -> "tuple[Problem, Problem | None]":
    """The problem that the plan solves; and the same problem with padded texts, where texts differ in length."""
    from isobatch.deployments.planning import device
    from isobatch.optimizer import problem
    from isobatch.optimizer.plan import opened

    if differ(plan.weights, profile.weights):
        raise UserError(f"the plan is for {plan.model}, the profile is of {profile.model}, whose weights are others")
    devices = [device(kind, count) for kind, count in plan.devices().items()]
    measured = profile.on(plan.backend, plan.dtype)
    links = links_between(devices, one_machine=one_machine, measured=profile.links)
    for kind in plan.devices():
        measured.check_has(kind, plan.backend, plan.dtype)
    survival = measured.exits_of(plan.length).planning_survival(opened(plan))
    facts = problem(measured, devices, links, survival, length=plan.length)
    if plan.num_blocks != facts.num_blocks:
        raise UserError(f"the plan covers {plan.num_blocks} blocks, the network of the profile {facts.num_blocks}")
    if not plan.length or not measured.lengths:
        return facts, None
    tokens = measured.lengths.tokens
    longest = max(plan.length, tokens[min(len(tokens) - 1, int(PADDED_SHARE * len(tokens)))])
    return facts, problem(measured, devices, links, survival, length=longest)


def _table(all_steps: "list[MechanismStep]") -> "object":
    from isobatch.cluster.simulator.sustained import IN_TIME_SHARE

    table = Table(
        "mechanism",
        "goodput",
        "change",
        "of this plan",
        title=f"the best plan with each mechanism, {IN_TIME_SHARE:.0%} in time",
    )
    last_per_s, before = all_steps[-1].goodput_per_s, None
    for each in all_steps:
        if not each.goodput_per_s:
            table.add_row(each.mechanism, "-", "no plan keeps the SLO", "-")
            continue
        change = "" if not before else f"{each.goodput_per_s / before - 1:+.0%}"
        share = f"{each.goodput_per_s / last_per_s:.0%}" if last_per_s else "-"
        table.add_row(each.mechanism, number_text(each.goodput_per_s), change, share)
        before = each.goodput_per_s
    return table


def _draw(all_steps: "list[MechanismStep]", path: Path) -> None:
    """A waterfall: each bar goes from the goodput before a step to the one after it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 * len(all_steps) + 1.2), layout="constrained")
    axes, before = figure.subplots(), 0.0
    for row, each in enumerate(all_steps):
        is_last = row == len(all_steps) - 1
        left = 0.0 if is_last else before
        color = DARK if is_last else BLUE if each.goodput_per_s >= before else RED
        axes.barh(row, each.goodput_per_s - left, left=left, color=color)
        axes.text(max(each.goodput_per_s, before), row, f" {number_text(each.goodput_per_s)}", va="center")
        before = each.goodput_per_s or before
    axes.set_yticks(range(len(all_steps)), [each.mechanism for each in all_steps])
    axes.invert_yaxis()
    axes.set_xlabel("inputs per second that are answered in time")
    axes.margins(x=0.12)
    plain(axes)
    figure.savefig(path, dpi=110)
