"""Runs `isobatch simulate`: a classifier, the applications of a fleet side by side, or a decoder, under a load."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from isobatch.cluster.commands import number_text
from isobatch.cluster.commands.plan_texts import profile_for
from isobatch.cluster.commands.shared_options import check_not_given
from isobatch.cluster.controller.arbiter import Arbiter, FleetDecision
from isobatch.cluster.controller.config import ArbiterConfig, ControllerConfig
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem, classifier_problem
from isobatch.cluster.controller.rehearsal import Member, Replanned, replan, replan_fleet
from isobatch.cluster.load import prompts
from isobatch.cluster.load.workloads import Floats, Ints, Mix, exit_blocks
from isobatch.cluster.serving.serve_file import ServeFile, classifiers, controllers, name_of, served
from isobatch.cluster.simulator.event_loop import HostCosts
from isobatch.cluster.simulator.report import Report, draw, tables
from isobatch.cluster.simulator.simulation import Chunk, World, simulate
from isobatch.cluster.simulator.text_simulation import TextArrival, simulate_texts, text_arrivals
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.dispatch.messages import EARLY_S
from isobatch.deployments.graph import profile_of, read_graph
from isobatch.deployments.progress import bar, busy
from isobatch.deployments.sources import local
from isobatch.optimizer.plan import milliseconds, opened, read_plan
from isobatch.optimizer.text_plans import exits_of
from isobatch.profiles.devices import as_text
from isobatch.profiles.errors import UserError, naming_target, read_model
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.lengths import read_lengths

if TYPE_CHECKING:
    from isobatch.cluster.commands.simulate import ClassifierSimulationOptions, TextSimulationOptions

NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
NO_INPUTS = "nothing comes in so short a time: give more --hours, or a higher --rate"
PINNED = "its args: have a plan without replan: true, which a controller would keep; here the plan may change"
EXITS_SEED = 2  # the random stream that exits are drawn from; the streams of a run have other numbers


def shares_of(option: str) -> tuple[tuple[float, float], ...]:
    """
    >>> shares_of("0:0.8,600:0.2")
    ((0.0, 0.8), (600.0, 0.2))
    """
    shape = "SECONDS:SHARE,..., as in 0:0.8,600:0.2"
    parts = (parts_of(part.strip(), f"{NUMBER}:{NUMBER}", shape) for part in option.split(","))
    shares = tuple((float(at_s), float(share)) for at_s, share in parts)
    if [at_s for at_s, _ in shares] != sorted({at_s for at_s, _ in shares}):
        raise UserError(f"{option!r}: the seconds of a mix must ascend")
    if not all(0 <= share <= 1 for _, share in shares):
        raise UserError(f"{option!r}: the shares of a mix must be from 0 to 1")
    return shares


def parts_of(option: str, pattern: str, shape: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, option, re.IGNORECASE)
    if match is None:
        raise UserError(f"{option!r} must look like {shape}")
    return match.groups()


def world_of(config: AppConfig, jitter: float = 0.0, host: HostCosts | None = None) -> World:
    if config.profile is None or (config.plan is None and not isinstance(config.devices, dict)):
        of = f"{config.model or 'the demo'} has no plan to be simulated"
        raise UserError(
            f"{of}: 'isobatch serve MODEL --plan FILE --profile FILE --out FILE.yaml' writes a file with one"
        )
    graph = read_graph(config)
    limits = replace(config.limits(share=1.0), early_s=EARLY_S if host else 0.0)
    profile, slo_s = profile_of(config), config.slo_ms / 1e3
    survival = profile.exits_of(graph.facts.length).planning_survival(opened(graph.plan))
    facts = graph.facts.surviving(survival)  # of all inputs, whether or not a ramp lets them leave
    return World(graph.plan, facts, slo_s, limits, jitter, host, config.front_replicas)


def world_for(config: AppConfig, options: "ClassifierSimulationOptions") -> World:
    return world_of(config, options.jitter, read_model(options.host, HostCosts) if options.host else None)


def controlled_world(
    config: AppConfig, controller: ControllerConfig, world: World
) -> tuple[World, ClassifierPlanningProblem]:
    """The same world with all devices that the controller may use, and the controller's planning problem.

    A simulated input that would leave at a closed ramp leaves at the next open one, so the controller expects no other.
    """
    exits = ExitProfile(world.facts.survival)
    profile = replace(profile_of(config), exits=exits, token_exits=exits if world.facts.length else None)
    problem = classifier_problem(controller, config, profile)
    facts = problem.in_units_of(world.plan).facts(world.facts.survival, Corrections())
    return replace(world, facts=facts.surviving(world.facts.survival) if problem.answers_early else facts), problem


def run(world: World, load: "ClassifierSimulationOptions") -> Report:
    """Simulate with a progress bar over simulated time."""
    with bar("simulated seconds", load.seconds) as progress:
        return simulate(world, inputs_of(world, load), load.seconds, load.seed, progress)


def inputs_of(world: World, load: "ClassifierSimulationOptions") -> Iterator[Chunk]:
    """Chunks of arrivals, with the tokens of each input where a file gives them."""
    if not load.lengths:
        return _arrivals(world, load)
    if world.facts.length is None:
        why = "the plan counts inputs, not tokens: profile with --data, and plan again"
        raise UserError(f"--lengths {load.lengths}: {why}")
    tokens = cycle(read_lengths(load.lengths))
    return ((at_s, blocks, np.fromiter(islice(tokens, len(at_s)), np.int64)) for at_s, blocks in _arrivals(world, load))


def _arrivals(world: World, load: "ClassifierSimulationOptions") -> Iterator[tuple[Floats, Ints]]:
    """Chunks of arrivals, with exits as drawn from the mix, else as drawn from the profile."""
    at_s, profile = load.times_s(load.seconds), ExitProfile(world.facts.survival)
    mix = Mix.of(profile, shares_of(load.mix)) if load.mix else None
    random = np.random.default_rng([load.seed, EXITS_SEED])
    parts = np.array_split(at_s, max(1, len(at_s) >> 16))
    return ((each, mix.exit_blocks(each, random) if mix else exit_blocks(profile, len(each), random)) for each in parts)


def decisions(replanned: Replanned) -> Table:
    table = Table("at", "", "why", "promised", "seen", title=f"{len(replanned.changes)} changes of plan")
    for event in replanned.changes:
        gains = ("" if gain is None else f"{gain:+.1%}" for gain in (event.gain_promised, event.gain_seen))
        table.add_row(f"{event.at_s:,.0f} s", event.what, event.why, *gains)
    return table


def rehearse_inputs(options: "ClassifierSimulationOptions", application: dict[str, Any], content: ServeFile) -> None:
    """Run a classifier's dispatcher, and its controller with --replan."""
    options.check_read()
    app_config = checked(AppConfig, application["args"])
    world = world_for(app_config, options)
    console, changes_s = Console(soft_wrap=True, markup=False), list[float]()
    if options.trace_text:
        console.print(options.trace_text, highlight=False)
    if options.replan:
        _print_pinned(console, [application])
        controller = _controller_of(name_of(application), content)
        alone = controller.model_copy(update={"shared": {}})  # no arbiter gives it other devices
        world, problem = controlled_world(app_config, alone, world)
        with bar("simulated seconds", options.seconds) as progress:
            inputs = inputs_of(world, options)
            replanned = replan(world, problem, inputs, options.seconds, seed=options.seed, progress=progress)
        report, changes_s = replanned.report, [event.at_s for event in replanned.changes]
        console.print(decisions(replanned))
    else:
        report = run(world, options)
    if not report.arrived:
        raise UserError(NO_INPUTS)
    for table in tables(report, world.slo_s):
        console.print(table)
    _draw(report, world.slo_s, options.out, changes_s)
    console.print(f"drawn in {options.out}")


def rehearse_fleet(options: "ClassifierSimulationOptions", content: ServeFile, arbiter: Mapping[str, Any]) -> None:
    """Run each dispatcher; with --replan each under its controller, and all under the arbiter."""
    config = checked(ArbiterConfig, arbiter["args"])
    loads = loads_of(options, [each.name for each in config.applications])
    members = {name: _member(name, load, content) for name, load in loads.items()}
    console, decisions = Console(soft_wrap=True, markup=False), list[FleetDecision]()
    changes_s = dict[str, list[float]]()
    if options.replan:
        _print_pinned(console, [each for each in classifiers(content) if name_of(each) in members])
        with bar("simulated seconds", options.seconds) as progress:
            fleet = replan_fleet(members, options.seconds, Arbiter(config), seed=options.seed, progress=progress)
        reports, decisions = {name: each.report for name, each in fleet.applications.items()}, fleet.moves
        changes_s = {name: [event.at_s for event in each.changes] for name, each in fleet.applications.items()}
    else:
        reports = {name: run(each.world, loads[name]) for name, each in members.items()}
    if not any(report.arrived for report in reports.values()):
        raise UserError(NO_INPUTS)
    for table in _tables(reports, decisions, members, options.replan):
        console.print(table)
    for name, report in reports.items():
        picture = options.out.with_stem(f"{options.out.stem}-{name}")
        _draw(report, members[name].world.slo_s, picture, changes_s.get(name, ()))
        console.print(f"drawn in {picture}")


def _print_pinned(console: Console, applications: Sequence[dict[str, Any]]) -> None:
    for each in applications:
        if checked(AppConfig, each["args"]).pinned:
            console.print(f"{name_of(each)}: {PINNED}", highlight=False)


def _draw(report: Report, slo_s: float, picture: Path, changes_s: Sequence[float]) -> None:
    with naming_target(picture, picture):
        draw(report, slo_s, picture, changes_s)


def loads_of(options: "ClassifierSimulationOptions", names: Sequence[str]) -> "dict[str, ClassifierSimulationOptions]":
    """The options of each application: its own load, else that of --rate and --trace, and a seed of its own."""
    shape = "NAME=RATE or NAME=RATE@TRACE, as in reviews=200@bursts.csv"
    given = dict[str, tuple[float, Path | None]]()
    for written in options.load or ():
        name, rate, trace = parts_of(written, rf"([\w.-]+)={NUMBER}((?:@.+)?)", shape)
        if name not in names or name in given:
            wrong = "is given twice" if name in given else f"is none of this fleet: {', '.join(names)}"
            raise UserError(f"--load {written}: {name} {wrong}")
        given[name] = float(rate), Path(trace[1:]) if trace else None
    lacks = next((name for name in names if name not in given), None)
    if lacks is None:
        check_not_given(
            options, ("rate", "trace"), "is for applications without --load, and each has one: leave it out"
        )
    elif not options.given:
        raise UserError(f"{lacks} has no load: add --load {lacks}=RATE, or --rate for all that --load does not name")
    shared = options.rate, options.trace
    loads = {
        name: replace(options, rate=rate, trace=trace, seed=options.seed + number)
        for number, name in enumerate(names)
        for rate, trace in [given.get(name, shared)]
    }
    _check_read([*loads.values()])
    return loads


def _check_read(loads: Sequence["ClassifierSimulationOptions"]) -> None:
    """Raise UserError for an option on arrivals that applies to no application."""
    one, *_ = untraced = [each for each in loads if not each.trace] or loads
    some_traced = len(untraced) < len(loads)
    (replace(one, trace_each_s=None) if some_traced else one).check_read()


def single_application(content: ServeFile) -> dict[str, Any]:
    applications = served(content)
    if len(applications) != 1:
        names = ", ".join(map(name_of, applications)) or "none of isobatch"
        raise UserError(f"the Serve file has {names}: --application names the one to simulate")
    return applications[0]


def _controller_of(application: str, content: ServeFile) -> ControllerConfig:
    """The configuration of an application's controller; the usual one if the file has none."""
    leads = (checked(ControllerConfig, each["args"]) for each in controllers(content))
    return next((each for each in leads if each.application == application), ControllerConfig())


def _member(name: str, load: "ClassifierSimulationOptions", content: ServeFile) -> Member:
    application = checked(AppConfig, next(each["args"] for each in classifiers(content) if name_of(each) == name))
    controller = _controller_of(name, content)
    world, problem = controlled_world(application, controller, world_for(application, load))
    return Member(world, problem, inputs_of(world, load), controller, stands_by=bool(application.standby))


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
        times = (milliseconds(report.tally.quantile_s(share)) if report.answered else "-" for share in (0.5, 0.99))
        devices = first if first == last else f"{first}, in the end {last}"
        table.add_row(name, devices, *_counts([report], seconds), *times)
    table.add_row("all", "", *_counts(list(reports.values()), seconds))
    if not (replanned and decisions):
        table.caption = "no device was moved" if replanned else None
        return [table]
    moves = Table("at", "why", title=f"devices moved {len(decisions)} times")
    for decision in decisions:
        moves.add_row(f"{decision.at_s:,.0f} s", decision.why)
    return [table, moves]


def _counts(reports: Sequence[Report], seconds: float) -> tuple[str, ...]:
    arrived, good = (sum(getattr(each, name) for each in reports) for name in ("arrived", "good"))
    return f"{arrived:,}", f"{good:,}", f"{good / max(1, arrived):.1%}", number_text(good / seconds)


def rehearse_texts(options: "TextSimulationOptions", application: Mapping[str, Any]) -> None:
    """Run a decoder's own engine and scheduler, with launches that only take the time that its profile says."""
    options.check_read()
    config = checked(DecoderConfig, application["args"])
    if config.plan is None:
        raise UserError("there is no plan: isobatch plan makes one, and --plan names it")
    source, plan = config.folder, read_plan(local(config.plan))
    profile = profile_for(source, local(config.profile) if config.profile else None, exits_of(plan))
    texts = text_arrivals(profile.workload, options.times_s(options.seconds), options.seed)
    if not texts:
        raise UserError(NO_INPUTS)
    console = Console(soft_wrap=True, highlight=False)
    if options.trace_text:
        console.print(options.trace_text, markup=False)
    if options.prompts:
        texts = _with_prompts_of(options.prompts, texts, source)
    with busy("simulating"):
        run = simulate_texts(plan, profile, texts, options.seed, config)
    console.print(prompts.table(prompts.summed(run.texts, 1e3 * run.ttft_s), 1e3 * run.ttft_s))
    tokens = sum(run.exits.values()) or 1
    exits = ", ".join(f"{count / tokens:.1%} after block {block}" for block, count in sorted(run.exits.items()))
    console.print(
        f"TTFT of {1e3 * run.ttft_s:g} ms kept for {run.ttft_kept:.1%} of the texts, "
        f"TPOT of {1e3 * run.tpot_s:g} ms for {run.tpot_kept:.1%}; "
        f"tokens known: {exits}; {run.preempted} times a text lost its pages and began again"
    )


def _with_prompts_of(file: Path, texts: Sequence[TextArrival], source: Path) -> list[TextArrival]:
    """The same texts, whose prompts have the lengths of those in a file, in turn."""
    from isobatch.deployments.decoding.engine_setup import load_tokenizer  # imports torch

    tokenizer = load_tokenizer(source)
    lengths = cycle([len(tokenizer(prompt)["input_ids"]) for prompt in prompts.prompts_in(file)])
    return [replace(text, prompt=length) for text, length in zip(texts, lengths, strict=False)]
