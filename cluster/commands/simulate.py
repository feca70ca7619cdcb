"""`isobatch simulate`: rehearse a plan under a load, with the dispatcher that would serve it, in virtual time."""

from pathlib import Path
from typing import Annotated

import typer

from cluster.experiment import tool
from profiles.errors import UserError


def simulate(
    config: Annotated[Path, typer.Option(help="A Serve file whose args: name a plan and a profile.")],
    rate: Annotated[float, typer.Option(help="Inputs per second, on average.")],
    trace: Annotated[Path | None, typer.Option(help="A recorded trace to follow, scaled to --rate.")] = None,
    hours: Annotated[float, typer.Option(help="How long, in simulated time.")] = 0.1,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma, uniform, step or daynight.")] = "poisson",
    cv: Annotated[float, typer.Option(help="Variation of the gaps between arrivals (gamma).")] = 3.0,
    jitter: Annotated[float, typer.Option(help="How much launches vary: 0.1 is about 10 %.")] = 0.0,
    failures: Annotated[float, typer.Option(help="Share of launches that fail.")] = 0.0,
    front_ms: Annotated[float, typer.Option(help="What the front door adds to every answer.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed, the same run.")] = 0,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("simulation.png"),
) -> None:
    """Goodput, latency and cost of a plan under a load, in seconds instead of hours.

    Example: [bold]isobatch simulate --config serve.yaml --rate 2000 --hours 1[/]
    """
    from rich.console import Console

    from cluster.serve_file import ours, serve_file
    from deployments.config import parse

    applications = ours(serve_file(config, {}))
    if len(applications) != 1:
        raise UserError(f"{config} has {len(applications)} applications of isobatch: a simulation needs exactly one")
    devices, simulation = tool("devices", "simulate"), tool("simulation", "simulate")
    troubles = devices.Troubles(jitter=jitter, fail_share=failures)
    world = simulation.world(parse(applications[0]["args"]), troubles, front_ms / 1e3)
    report = simulation.run(world, simulation.Load(rate, hours * 3600, arrivals, cv, trace, seed))
    console = Console(soft_wrap=True)
    for table in simulation.tables(report, world):
        console.print(table)
    simulation.draw(report, world.slo_s, out)
    console.print(f"drawn in {out}")
