"""`isobatch simulate`: rehearse a plan under a load, with the dispatcher that would serve it, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiles.errors import UserError

if TYPE_CHECKING:
    from cluster.controller.config import ControllerConfig
    from cluster.controller.record import Event
    from cluster.serving.serve_file import ServeFile


def simulate(
    config: Annotated[
        Path, typer.Option(help="A Serve file whose args: name a plan and a profile, or a decoder's directory.")
    ],
    plan: Annotated[Path | None, typer.Option(help="The plan, where the file names none.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Of a decoder: prompts, one a line, in turn. None: as long as was measured.")
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
        typer.Option(
            help="How long texts are: tokens, one number per line, again and again. None: as the profile says."
        ),
    ] = None,
    jitter: Annotated[float, typer.Option(help="How much launches vary: 0.1 is about 10 %.")] = 0.0,
    slow: Annotated[
        list[str] | None, typer.Option(help="A straggler, as REPLICA=TIMES: v100/3=2 takes twice as long. Repeatable.")
    ] = None,
    gone: Annotated[
        list[str] | None,
        typer.Option(help="A replica that is gone for a while, as REPLICA=FROM-UNTIL in seconds. Repeatable."),
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
    from rich.console import Console

    from cluster.commands import check_writable
    from cluster.commands.simulate_decoder import DecoderRehearsal
    from cluster.load.traces import understood
    from cluster.serving.serve_file import decoders, ours, serve_file
    from cluster.simulator import command, options, picture
    from cluster.simulator.host import read_host
    from cluster.simulator.report import tables
    from cluster.simulator.troubles import Troubles
    from deployments.config import parse

    check_writable(out)
    content = serve_file(config, {"plan": str(plan.resolve())} if plan else {})
    load = command.Workload(rate, hours * 3600, arrivals, cv, trace, seed, mix, drift, exits, lengths, trace_each_s)
    if decoding := decoders(content):
        for_classifiers = {
            "--mix": (mix, ""),
            "--drift": (drift, False),
            "--exits": (exits, None),
            "--lengths": (lengths, None),
            "--jitter": (jitter, 0.0),
            "--slow": (slow or None, None),
            "--gone": (gone or None, None),
            "--failures": (failures, 0.0),
            "--replan": (replan, False),
            "--host": (host, None),
            "--out": (out, Path("simulation.png")),
        }
        DecoderRehearsal(decoding, prompts, load, for_classifiers).run()
        return
    if prompts:
        raise UserError("--prompts is for decoders: this network writes nothing")
    applications = ours(content)
    if len(applications) != 1:
        raise UserError(f"{config} has {len(applications)} applications of isobatch: a simulation needs exactly one")
    if mix and exits:
        raise UserError("--mix and --exits both say how hard inputs are: give one of them")
    troubles = Troubles(jitter, options.slow_of(slow or ()), failures, options.outages_of(gone or ()))
    app_config = parse(applications[0]["args"])
    world = command.world_of(app_config, troubles, read_host(host) if host else None)
    console, changes = Console(soft_wrap=True, markup=False), tuple["Event", ...]()
    if trace:
        console.print(understood(trace, trace_each_s), highlight=False)
    if replan:
        world, asked = command.controlled_world(app_config, _controller(content), world)
        replanned = command.run_controlled(world, asked, load)
        report, changes = replanned.report, replanned.changes
        console.print(command.decisions(replanned))
    else:
        report = command.run(world, load)
    for table in tables(report, world.slo_s):
        console.print(table)
    picture.draw(report, world.slo_s, out, changes)
    console.print(f"drawn in {out}")


def _controller(content: ServeFile) -> ControllerConfig:
    """The settings of the controller in the Serve file, or the defaults if the file has none."""
    from cluster.controller.config import ControllerConfig
    from cluster.serving.serve_file import controllers

    return ControllerConfig.model_validate(next((one.get("args") or {} for one in controllers(content)), {}))
