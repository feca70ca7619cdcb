"""`isobatch simulate`: rehearse a plan under a load, with the dispatcher that would serve it, in virtual time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


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
    from cluster.commands import check_writable, options_for, simulate_run
    from cluster.serving.serve_file import decoders, serve_file

    check_writable(out)
    content = serve_file(config, {"plan": str(plan.resolve())} if plan else {})
    load = simulate_run.Workload(
        rate, hours * 3600, arrivals, cv, trace, seed, mix, drift, exits, lengths, trace_each_s
    )
    if applications := decoders(content):
        refusal = "is for classifiers: texts of a decoder are simulated without it"
        of_texts = options_for(DecoderSimulationOptions, simulate, values, refusal)
        simulate_run.rehearse_texts(applications, load, of_texts.prompts)
    else:
        refusal = "is for decoders: this network writes nothing"
        of_inputs = options_for(ClassifierSimulationOptions, simulate, values, refusal)
        simulate_run.rehearse_inputs(of_inputs, content, load)
