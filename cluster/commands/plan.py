"""`isobatch plan`: which blocks run where, in how many replicas, at what batch size, and with what promise."""

import json
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from isobatch.cluster.commands import Dtype, above_0
from isobatch.cluster.commands.shared_options import check_not_given, check_only, flag, in_panels, with_options
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import load, write_whole

if TYPE_CHECKING:
    from isobatch.cluster.commands.plan_report import PlanResult
    from isobatch.optimizer import Objective


@dataclass(frozen=True, kw_only=True)
class _CommonOptions:
    profile: Annotated[
        Path | None, "Measured times: a file of 'isobatch profile'. Not needed for a decoder that was profiled here."
    ] = None
    devices: Annotated[
        str | None,
        "The fleet, as in a100=6,t4=15@0.45 (dollars per hour). For a decoder, if not given: one device as measured.",
    ] = None
    rate: Annotated[float | None, "Inputs per second to sustain; if not given, as many as possible."] = None
    goal: Annotated[
        str | None, typer.Option(help="goodput (if not given), cost, latency or goodput-per-dollar.", metavar="NAME")
    ] = None
    in_time: Annotated[float, "The share of inputs that must be answered in time at the promised rate."] = 0.99
    out: Annotated[Path | None, "Write the plan as JSON."] = None
    as_json: Annotated[bool, "Print JSON, for other programs."] = False


@dataclass(frozen=True, kw_only=True)
class ClassifierPlanOptions(_CommonOptions):
    """The options for a network that classifies."""

    slo_ms: Annotated[float | None, "The deadline of every answer; if not given, there is none."] = None
    budget: Annotated[float | None, "The most dollars per hour."] = None
    slack: Annotated[float, "The share of the SLO that estimates reserve for bursts; simulated plans need none."] = 0.2
    backend: Annotated[str, "Times of this backend, where the profile has several: onnx, torch, graphs, tensorrt."] = ""
    dtype: Annotated[
        Dtype | None, "Times in this precision, where the profile has several; none: the first, the network's own."
    ] = None
    no_later: Annotated[bool, "No longer p99 latency than without exits, whatever the SLO allows."] = False
    max_batch: Annotated[int | None, "The largest batch; none: the largest that was timed."] = None
    cut: Annotated[str | None, "Cut before exactly these blocks: 2,4. If not given: where it pays."] = None
    one_machine: Annotated[bool, "All devices are in one machine, without a network between them."] = False
    gap: Annotated[float, "Stop when no plan can be better by more than this share."] = 0.0
    seconds: Annotated[
        float | None, "Take the best plan found in about this time. Ctrl-C ends earlier and keeps it."
    ] = None
    no_simulation: Annotated[bool, "Simulate nothing: promise the planner's own estimate of the goodput."] = False


@dataclass(frozen=True, kw_only=True)
class DecoderPlanOptions(_CommonOptions):
    """The options for a decoder."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="A fleet's file (*.yaml) of several applications; or directory or URL of a decoder, or llm-demo. "
            "Others need only --profile."
        ),
    ] = None
    ttft_ms: Annotated[float, "The time to the first token."] = 1000.0
    tpot_ms: Annotated[float, "The time from one token to the next."] = 200.0
    exits: Annotated[str, "How tokens leave early: recompute, verified, project or off."] = "recompute"
    kv_megabytes: Annotated[
        int | None, typer.Option(min=1, help="The most memory for KV on a replica; if not given: all there is.")
    ] = None


PANELS = {
    "Further limits": ("in_time", "budget", "slack", "no_later", "cut", "one_machine"),
    "Search": ("gap", "seconds", "no_simulation"),
    "Decoders": ("ttft_ms", "tpot_ms", "exits", "kv_megabytes"),
}


@in_panels(PANELS)
@with_options(classifier=ClassifierPlanOptions, decoder=DecoderPlanOptions)
def plan(classifier: ClassifierPlanOptions, decoder: DecoderPlanOptions) -> None:
    """Find the best plan for a profile and a fleet, and print a bound on how much better another plan could be.

    The plan of a decoder says where the network is cut, how many texts are resident, and when its deep part runs. Ways
    to decode are ranked by arithmetic, and the best are simulated; --rate is texts per second, at the least cost.

    Example: [bold]isobatch plan my-llama-ee --ttft-ms 500 --tpot-ms 50 --out plan.json[/]

    Example: [bold]isobatch plan --profile bert.json --devices a100=6,l4=8 --slo-ms 100 --out plan.json[/]

    Example: [bold]isobatch plan fleet.yaml --out serve.yaml[/], several applications on one set of devices
    """
    for name in ("slo_ms", "rate", "budget", "max_batch", "seconds"):
        above_0(flag(name), getattr(classifier, name))
    for name in ("ttft_ms", "tpot_ms"):
        above_0(flag(name), getattr(decoder, name))
    target = decoder.model
    if target and Path(target).suffix in (".yaml", ".yml"):
        from isobatch.cluster.commands.plan_fleet import OF_ONE, plan_fleet

        refusal = "is for one application: the fleet's file says it, or every application has its own"
        check_not_given(classifier, OF_ONE, refusal)
        only = "is for decoders, and fleets are of classifiers: leave it out"
        check_only(ClassifierPlanOptions, replace(decoder, model=None), only)
        plan_fleet(Path(target), classifier)
    elif target:
        from isobatch.cluster.commands.plan_texts import plan_decoder

        refusal = "is for classifiers, which are planned by --profile without a directory; a decoder has --ttft-ms"
        check_only(DecoderPlanOptions, classifier, refusal)
        plan_decoder(decoder)
    else:
        check_only(ClassifierPlanOptions, decoder, "is for decoders: name the directory of one")
        plan_classifier(classifier)


def plan_classifier(options: ClassifierPlanOptions) -> "PlanResult":
    from isobatch.cluster.commands import check_writable, plan_report
    from isobatch.cluster.commands.plan_search import named, objective_of, planned

    if options.profile is None or options.devices is None:
        raise UserError("--profile and --devices are needed, unless you name a decoder's directory")
    if out := options.out:
        check_writable(out, options.profile)
    profile, objective = load(options.profile), objective_of(options)
    _check_has_effect(options, objective)
    result = planned(options, options.devices, profile, objective)
    if out:
        write_whole(out, named(result.plan, profile, objective.slo_s).to_json())
    if options.as_json:
        print(json.dumps(result.as_json(), indent=2))
        return result
    console = Console()
    for table in plan_report.tables(result, objective):
        console.print(table)
    if out:
        console.print(f"written to {out}", highlight=False, soft_wrap=True, markup=False)
    return result


def _check_has_effect(options: ClassifierPlanOptions, objective: "Objective") -> None:
    """Raise UserError for an option without an effect on such plans."""
    from isobatch.cluster.simulator.plan_choice import why_not_simulated

    if objective.slo_s is None:
        check_not_given(options, ("slack",), "is for plans with a deadline: give --slo-ms")
    limited = replace(objective, slo_s=inf) if options.no_later else objective  # its SLO is not known yet
    if why := why_not_simulated(limited):
        check_not_given(options, ("in_time",), f"is for plans that are simulated: {why}")
