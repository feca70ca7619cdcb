"""`isobatch simulate`: rehearse a plan under a load, with the dispatcher that would serve it, in virtual time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from isobatch.cluster.commands.shared_options import ArrivalOptions, GivenOptions, of_kinds


@dataclass(frozen=True, kw_only=True)
class CommonOptions(ArrivalOptions):
    config: Annotated[Path, "A Serve file whose args: name a plan and a profile, or a decoder's directory."]
    application: Annotated[str | None, "The name of the application, where the file has several."] = None
    plan: Annotated[Path | None, "The plan, where the file names none."] = None
    hours: Annotated[float, "How long, in simulated time."] = 0.1

    @property
    def seconds(self) -> float:
        return 3600 * self.hours


@dataclass(frozen=True, kw_only=True)
class ClassifierSimulationOptions(CommonOptions):
    """The options for a network that classifies."""

    mix: Annotated[
        str,
        "Share of easy inputs (the half that leaves first) from some second on, as SECONDS:SHARE,... "
        "Example: 0:0.8,600:0.5 switches after ten minutes.",
    ] = ""
    drift: Annotated[bool, "The share of --mix changes slowly instead of at once."] = False
    exits: Annotated[Path | None, "Recorded exits: one block number per line, in order of arrival."] = None
    lengths: Annotated[
        Path | None, "The tokens of each text, one number per line, in turn. None: as the profile says."
    ] = None
    jitter: Annotated[float, "How much launches vary: 0.1 is about 10 %."] = 0.0
    slow: Annotated[list[str] | None, "A straggler, as REPLICA=TIMES: v100/3=2 takes twice as long. Repeatable."] = None
    gone: Annotated[
        list[str] | None, "A replica that is away for a time, as REPLICA=FROM-UNTIL in seconds. Repeatable."
    ] = None
    failures: Annotated[float, "Share of launches that fail."] = 0.0
    replan: Annotated[bool, "Let the controller re-plan every two minutes."] = False
    host: Annotated[Path | None, "What serving costs beside the devices: host.json of make bench-fidelity."] = None
    out: Annotated[Path, "The picture."] = Path("simulation.png")


@dataclass(frozen=True, kw_only=True)
class DecoderSimulationOptions(CommonOptions):
    """The options for a decoder, a network that writes texts token by token."""

    prompts: Annotated[Path | None, "For a decoder: prompts, one a line, in turn. None: as long as measured."] = None


@of_kinds(ClassifierSimulationOptions, DecoderSimulationOptions)
def simulate(given: GivenOptions) -> None:
    """Simulate goodput, latency and cost of a plan under a load, hours in seconds.

    Example: [bold]isobatch simulate --config serve.yaml --rate 2000 --hours 1[/]
    """
    from isobatch.cluster.commands import check_writable, simulate_run
    from isobatch.cluster.serving.serve_file import decoders, only, serve_file

    check_writable(given.values["out"])
    plan = given.values["plan"]
    content = serve_file(given.values["config"], {"plan": str(plan.resolve())} if plan else {})
    if name := given.values["application"]:
        content = only(name, content)
    if applications := decoders(content):
        refusal = "is for classifiers: texts of a decoder are simulated without it"
        simulate_run.rehearse_texts(given.only(DecoderSimulationOptions, refusal), applications)
    else:
        refusal = "is for decoders: this network writes nothing"
        simulate_run.rehearse_inputs(given.only(ClassifierSimulationOptions, refusal), content)
