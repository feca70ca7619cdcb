"""`isobatch simulate`: rehearse a plan under a load, with the dispatcher that would serve it, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiles.errors import UserError

if TYPE_CHECKING:
    from cluster.controller.config import ControllerConfig
    from cluster.controller.record import Event
    from cluster.decoding.simulation import TextArrival
    from cluster.serving.serve_file import ServeFile
    from cluster.simulator.command import Workload


@dataclass(frozen=True)
class _CommonOptions:
    config: Path
    plan: Path | None
    rate: float | None
    trace: Path | None
    trace_each_s: float | None
    hours: float
    arrivals: str
    cv: float
    seed: int


@dataclass(frozen=True)
class ClassifierSimulationOptions(_CommonOptions):
    """The options for a network that classifies."""

    mix: str
    drift: bool
    exits: Path | None
    lengths: Path | None
    jitter: float
    slow: list[str] | None
    gone: list[str] | None
    failures: float
    replan: bool
    host: Path | None
    out: Path


@dataclass(frozen=True)
class DecoderSimulationOptions(_CommonOptions):
    """The options for a decoder, a network that writes texts token by token."""

    prompts: Path | None


def simulate(
    config: Annotated[
        Path, typer.Option(help="A Serve file whose args: name a plan and a profile, or a decoder's directory.")
    ],
    plan: Annotated[Path | None, typer.Option(help="The plan, where the file names none.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="For a decoder: prompts, one a line, in turn. None: as long as measured.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Inputs per second, on average. Not needed with --trace: its own then.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A recorded trace to follow, scaled to --rate (docs/simulator.md: formats).")
    ] = None,
    trace_each_s: Annotated[
        float | None, typer.Option(help="The seconds that each count of the trace is for, if the file does not say.")
    ] = None,
    hours: Annotated[float, typer.Option(help="How long, in simulated time.")] = 0.1,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma, uniform, step or daynight.")] = "poisson",
    cv: Annotated[float, typer.Option(help="Variation of the gaps between arrivals (gamma).")] = 3.0,
    mix: Annotated[
        str,
        typer.Option(
            help="Share of easy inputs (the half that leaves first) from some second on, as SECONDS:SHARE,... "
            "Example: 0:0.8,600:0.5 switches after ten minutes."
        ),
    ] = "",
    drift: Annotated[bool, typer.Option("--drift", help="Between those times the share drifts, not switches.")] = False,
    exits: Annotated[
        Path | None, typer.Option(help="Recorded exits instead: one block number per line, in order of arrival.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(help="The tokens of each text, one number per line, in turn. None: as the profile says."),
    ] = None,
    jitter: Annotated[float, typer.Option(help="How much launches vary: 0.1 is about 10 %.")] = 0.0,
    slow: Annotated[
        list[str] | None, typer.Option(help="A straggler, as REPLICA=TIMES: v100/3=2 takes twice as long. Repeatable.")
    ] = None,
    gone: Annotated[
        list[str] | None,
        typer.Option(help="A replica that is away for a time, as REPLICA=FROM-UNTIL in seconds. Repeatable."),
    ] = None,
    failures: Annotated[float, typer.Option(help="Share of launches that fail.")] = 0.0,
    replan: Annotated[bool, typer.Option("--replan", help="With the controller, every two minutes.")] = False,
    host: Annotated[
        Path | None,
        typer.Option(help="What serving costs beside the devices, as make bench-fidelity measured it: its host.json."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same run.")] = 0,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("simulation.png"),
) -> None:
    """Goodput, latency and cost of a plan under a load, in seconds instead of hours.

    Example: [bold]isobatch simulate --config serve.yaml --rate 2000 --hours 1[/]
    """
    values: dict[str, Any] = dict(locals())
    from cluster.commands import check_writable, options_for
    from cluster.serving.serve_file import decoders, serve_file
    from cluster.simulator.command import Workload

    check_writable(out)
    content = serve_file(config, {"plan": str(plan.resolve())} if plan else {})
    load = Workload(rate, hours * 3600, arrivals, cv, trace, seed, mix, drift, exits, lengths, trace_each_s)
    if applications := decoders(content):
        refusal = "is for classifiers: texts of a decoder are simulated without it"
        _simulate_decoder(options_for(DecoderSimulationOptions, simulate, values, refusal), applications, load)
    else:
        refusal = "is for decoders: this network writes nothing"
        _simulate_classifier(options_for(ClassifierSimulationOptions, simulate, values, refusal), content, load)


def _simulate_classifier(options: ClassifierSimulationOptions, content: ServeFile, load: Workload) -> None:
    from rich.console import Console

    from cluster.load.traces import description
    from cluster.serving.serve_file import classifiers
    from cluster.simulator import command, picture
    from cluster.simulator.host import read_host
    from cluster.simulator.options import outages_of, slow_of
    from cluster.simulator.report import tables
    from cluster.simulator.troubles import Troubles
    from deployments.config import parse

    applications = classifiers(content)
    if len(applications) != 1:
        count = len(applications)
        raise UserError(f"{options.config} has {count} applications of isobatch: a simulation needs exactly one")
    if options.mix and options.exits:
        raise UserError("--mix and --exits both say how hard inputs are: give one of them")
    troubles = Troubles(options.jitter, slow_of(options.slow or ()), options.failures, outages_of(options.gone or ()))
    app_config = parse(applications[0]["args"])
    world = command.world_of(app_config, troubles, read_host(options.host) if options.host else None)
    console, changes = Console(soft_wrap=True, markup=False), tuple["Event", ...]()
    if options.trace:
        console.print(description(options.trace, options.trace_each_s), highlight=False)
    if options.replan:
        world, problem = command.controlled_world(app_config, _controller(content), world)
        replanned = command.run_controlled(world, problem, load)
        report, changes = replanned.report, replanned.changes
        console.print(command.decisions(replanned))
    else:
        report = command.run(world, load)
    for table in tables(report, world.slo_s):
        console.print(table)
    picture.draw(report, world.slo_s, options.out, changes)
    console.print(f"drawn in {options.out}")


def _simulate_decoder(
    options: DecoderSimulationOptions, applications: Sequence[dict[str, Any]], load: Workload
) -> None:
    """Run a decoder's own engine and scheduler, with launches that only take the time that its profile says."""
    from rich.console import Console

    from cluster.commands.plan import profile_for
    from cluster.decoding.report import run_sentence
    from cluster.decoding.simulation import simulate_texts, text_arrivals
    from cluster.load.prompts import summed, table
    from deployments.config import checked
    from deployments.decoding.config import DecoderConfig
    from optimizer.decoding_plans import exits_of
    from optimizer.plan import read_plan

    if len(applications) != 1:
        raise UserError(f"{len(applications)} decoders are in the file: a simulation needs exactly one")
    config = checked(DecoderConfig, applications[0]["args"])
    if config.plan is None:
        raise UserError("there is no plan: isobatch plan makes one, and --plan names it")
    source, plan = Path(config.model), read_plan(Path(config.plan))
    profile = profile_for(source, Path(config.profile) if config.profile else None).for_exits(exits_of(plan))
    texts = text_arrivals(profile.workload, load.times_s(), load.seed)
    if not texts:
        raise UserError("no text comes in so short a time: give more --hours, or a higher --rate")
    if options.prompts:
        texts = _with_prompts_of(options.prompts, texts, source)
    with Console(stderr=True).status("simulating"):
        run = simulate_texts(plan, profile, texts, load.seed, config)
    console = Console(soft_wrap=True)
    console.print(table(summed(run.texts, 1e3 * run.ttft_s), 1e3 * run.ttft_s))
    console.print(run_sentence(run), highlight=False)


def _with_prompts_of(file: Path, texts: Sequence[TextArrival], source: Path) -> list[TextArrival]:
    """The same texts, whose prompts have the lengths of those in a file, in turn."""
    from cluster.load.prompts import prompts_in
    from deployments.decoding.engine_setup import load_tokenizer

    tokenizer = load_tokenizer(source)
    lengths = cycle([len(tokenizer(prompt)["input_ids"]) for prompt in prompts_in(file)])
    return [replace(text, prompt=length) for text, length in zip(texts, lengths, strict=False)]


def _controller(content: ServeFile) -> ControllerConfig:
    """The settings of the controller in the Serve file, or the defaults if the file has none."""
    from cluster.controller.config import ControllerConfig
    from cluster.serving.serve_file import controllers

    return ControllerConfig.model_validate(
        next((application.get("args") or {} for application in controllers(content)), {})
    )
