"""Runs `isobatch simulate` for the applications of a fleet: side by side, each under its own load."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from isobatch.cluster.commands.simulate_run import (
    NUMBER,
    controlled_world,
    inputs_of,
    parts_of,
    progress_bar,
    run,
    world_for,
)
from isobatch.cluster.controller.arbiter import Arbiter, FleetDecision
from isobatch.cluster.controller.config import ArbiterConfig, ControllerConfig
from isobatch.cluster.controller.rehearsal import Member, replan_fleet
from isobatch.cluster.serving.serve_file import ServeFile, classifiers, controllers, name_of
from isobatch.cluster.simulator.report import Report, draw
from isobatch.deployments.config import AppConfig, checked
from isobatch.profiles.devices import as_text
from isobatch.profiles.errors import UserError

if TYPE_CHECKING:
    from isobatch.cluster.commands.simulate import ClassifierSimulationOptions


def rehearse_fleet(options: "ClassifierSimulationOptions", content: ServeFile, arbiter: Mapping[str, Any]) -> None:
    """Run each dispatcher; with --replan each under its controller, and all under the arbiter."""
    config = checked(ArbiterConfig, arbiter["args"])
    loads = loads_of(options, [each.name for each in config.applications])
    members = {name: _member(name, load, content) for name, load in loads.items()}
    console, decisions = Console(soft_wrap=True, markup=False), list[FleetDecision]()
    changes_s = dict[str, list[float]]()
    if options.replan:
        with progress_bar(options.seconds) as progress:
            fleet = replan_fleet(members, options.seconds, Arbiter(config), seed=options.seed, progress=progress)
        reports, decisions = {name: each.report for name, each in fleet.applications.items()}, fleet.moves
        changes_s = {name: [event.at_s for event in each.changes] for name, each in fleet.applications.items()}
    else:
        reports = {name: run(each.world, loads[name]) for name, each in members.items()}
    for table in _tables(reports, decisions, members, options.replan):
        console.print(table)
    for name, report in reports.items():
        picture = options.out.with_stem(f"{options.out.stem}-{name}")
        draw(report, members[name].world.slo_s, picture, changes_s.get(name, ()))
        console.print(f"drawn in {picture}")


def loads_of(options: "ClassifierSimulationOptions", names: Sequence[str]) -> dict[str, "ClassifierSimulationOptions"]:
    """The options of each application: its own load, else that of --rate and --trace; its own stream of chance."""
    shape = "NAME=RATE or NAME=RATE@TRACE, as in reviews=200@bursts.csv"
    given = dict[str, tuple[float, Path | None]]()
    for written in options.load or ():
        name, rate, trace = parts_of(written, rf"([\w.-]+)={NUMBER}((?:@.+)?)", shape)
        if name not in names or name in given:
            wrong = "is given twice" if name in given else f"is none of this fleet: {', '.join(names)}"
            raise UserError(f"--load {written}: {name} {wrong}")
        given[name] = float(rate), Path(trace[1:]) if trace else None
    if (lacks := next((name for name in names if name not in given), None)) and not options.given:
        raise UserError(f"{lacks} has no load: add --load {lacks}=RATE, or --rate for all that --load does not name")
    shared = options.rate, options.trace
    return {
        name: replace(options, rate=rate, trace=trace, seed=options.seed + number)
        for number, name in enumerate(names)
        for rate, trace in [given.get(name, shared)]
    }


def _member(name: str, load: "ClassifierSimulationOptions", content: ServeFile) -> Member:
    application = checked(AppConfig, next(each["args"] for each in classifiers(content) if name_of(each) == name))
    leads = (checked(ControllerConfig, each["args"]) for each in controllers(content))
    controller = next(each for each in leads if each.application == name)
    world, problem = controlled_world(application, controller, world_for(application, load))
    return Member(world, problem, inputs_of(world, load), controller)


def _tables(
    reports: Mapping[str, Report], decisions: Sequence[FleetDecision], members: Mapping[str, Member], replanned: bool
) -> list[Table]:
    """What became of the inputs of each application and of all; with an arbiter, the moves of devices."""
    seconds = max(report.tally.seconds for report in reports.values())
    table = Table(
        "application", "devices", "arrived", "in time", "", "per second", "p50", "p99",
        title=f"{seconds:,.0f} s simulated",
    )  # fmt: skip
    for name, report in reports.items():
        first, last = (as_text(plan.devices()) for plan in (members[name].world.plan, report.plan))
        times = (f"{1e3 * report.tally.quantile_s(share):,.0f} ms" for share in (0.5, 0.99))
        devices = first if first == last else f"{first}, in the end {last}"
        table.add_row(name, devices, *_counts([report], seconds), *times)
    table.add_row("all", "", *_counts(list(reports.values()), seconds))
    if not replanned:
        return [table]
    moves = Table("at", "why", title=f"devices moved {len(decisions)} times")
    for decision in decisions:
        moves.add_row(f"{decision.at_s:,.0f} s", decision.why)
    return [table, moves]


def _counts(reports: Sequence[Report], seconds: float) -> tuple[str, ...]:
    arrived, good = (sum(getattr(each, name) for each in reports) for name in ("arrived", "good"))
    return f"{arrived:,}", f"{good:,}", f"{good / max(1, arrived):.1%}", f"{good / seconds:,.1f}"
