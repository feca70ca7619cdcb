"""`isobatch simulate`: rehearse a plan under a load, with the dispatcher that would serve it, in virtual time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from isobatch.cluster.commands.shared_options import ArrivalOptions, check_not_given, check_only, with_options
from isobatch.profiles.errors import UserError

OF_ONE = ("plan", "lengths")  # options without a meaning for several applications


@dataclass(frozen=True, kw_only=True)
class CommonOptions(ArrivalOptions):
    config: Annotated[Path, "A Serve file whose args: name a plan and a profile; decoders need no profile."]
    application: Annotated[str | None, "One of several, by its name. None: all of a fleet together."] = None
    plan: Annotated[Path | None, "The plan, in place of the one that the file names."] = None
    hours: Annotated[float, "How long, in simulated time."] = 0.1

    @property
    def seconds(self) -> float:
        return 3600 * self.hours


@dataclass(frozen=True, kw_only=True)
class ClassifierSimulationOptions(CommonOptions):
    mix: Annotated[
        str,
        "Share of easy inputs (the half that leaves first) from some second on, as SECONDS:SHARE,... "
        "Example: 0:0.8,600:0.5 switches after ten minutes.",
    ] = ""
    lengths: Annotated[
        Path | None, "The tokens of each text, one number per line, in turn. None: as the profile says."
    ] = None
    jitter: Annotated[float, "How much launches vary: 0.1 is about 10 %."] = 0.0
    replan: Annotated[bool, "Let the controller re-plan every two minutes, and a fleet's arbiter move devices."] = False
    load: Annotated[
        list[str] | None,
        "Of a fleet: an application and its inputs per second, as NAME=RATE or NAME=RATE@TRACE. Repeatable.",
    ] = None
    host: Annotated[Path | None, "What serving costs beside the devices: host.json of make bench-fidelity."] = None
    out: Annotated[Path, "The picture."] = Path("simulation.png")


@dataclass(frozen=True, kw_only=True)
class TextSimulationOptions(CommonOptions):
    prompts: Annotated[Path | None, "Prompts, one a line, in turn. None: as long as measured."] = None


@with_options(options=ClassifierSimulationOptions, decoder=TextSimulationOptions)
def simulate(options: ClassifierSimulationOptions, decoder: TextSimulationOptions) -> None:
    """Simulate goodput, latency and cost of a plan under a load, hours in seconds.

    Example: [bold]isobatch simulate --config serve.yaml --rate 2000 --hours 1[/]

    Applications that `isobatch plan fleet.yaml` put on one fleet run side by side, with --replan under their arbiter.
    """
    from isobatch.cluster.commands import check_picture, simulate_run
    from isobatch.cluster.serving.serve_file import arbiters, decoders, only, serve_file

    check_picture(options.out)
    plan, name = options.plan, options.application
    content = serve_file(options.config, {"plan": str(plan.resolve())} if plan else {}, name)
    if name:
        content = only(name, content)
    fleets = arbiters(content)
    if options.load and not fleets:
        raise UserError("--load is for the applications of a fleet together: give --rate for one application")
    if fleets:
        refusal = "is for one application: give its name with --application"
        check_not_given(options, OF_ONE, refusal)
        check_only(ClassifierSimulationOptions, decoder, refusal)
        simulate_run.rehearse_fleet(options, content, fleets[0])
    elif (application := simulate_run.single_application(content)) in decoders(content):
        check_only(TextSimulationOptions, options, "is for classifiers: texts are simulated without it")
        simulate_run.rehearse_texts(decoder, application)
    else:
        check_only(ClassifierSimulationOptions, decoder, "is for decoders: this network is not one")
        simulate_run.rehearse_inputs(options, application, content)
