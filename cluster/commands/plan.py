"""isobatch plan: which blocks run where, in how many replicas, at what batch size, and what that promises."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiles.errors import UserError, read_text

if TYPE_CHECKING:
    from cluster.commands.plan_result import PlanResult, Simulate
    from cluster.simulator.choice import Find, SimulatedChoice
    from optimizer import Objective, Plan, Problem
    from optimizer.decoding import DecodingGoal
    from optimizer.effort import Effort
    from profiles.decoding import DecoderProfile
    from profiles.devices import Device
    from profiles.exits import ExitProfile
    from profiles.files import Profile

TTFT_MS = 1000.0  # unless --ttft-ms is given, as a Serve file has it
TPOT_MS = 200.0  # unless --tpot-ms is given


@dataclass(frozen=True)
class _CommonOptions:
    profile: Path | None
    devices: str | None
    rate: float | None
    min_cost: bool
    in_time: float
    out: Path | None
    as_json: bool


@dataclass(frozen=True)
class ClassifierPlanOptions(_CommonOptions):
    """The options for a network that classifies."""

    slo_ms: float | None
    per_dollar: bool
    budget: float | None
    alpha: float | None
    slack: float
    backend: str
    dtype: str
    no_later: bool
    margin: float
    max_batch: int
    cut: str | None
    max_splits: int | None
    one_machine: bool
    one_pipeline: bool
    gap: float
    seconds: float | None
    polish: float | None
    believed: bool
    evaluate: Path | None
    surprises: bool
    shortfalls: bool
    picture: Path | None


@dataclass(frozen=True)
class DecoderPlanOptions(_CommonOptions):
    """The options for a decoder, a network that writes texts token by token."""

    model: Path
    ttft_ms: float | None
    tpot_ms: float | None
    exits: str | None
    kv_megabytes: int | None
    observed: str | None


def plan(
    model: Annotated[
        Path | None,
        typer.Argument(help="The directory of a decoder, or llm-demo; for other networks --profile is enough."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Measured times: a file of 'isobatch profile', which keeps that of a decoder by itself."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="The fleet: KIND=COUNT[@DOLLARS PER HOUR],... For a decoder, if not given: one device as measured."
        ),
    ] = None,
    slo_ms: Annotated[
        float | None, typer.Option(help="The deadline of every answer; if not given, there is none.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Inputs per second to sustain; if not given, as many as possible.")
    ] = None,
    min_cost: Annotated[bool, typer.Option("--min-cost", help="The cheapest devices that sustain --rate.")] = False,
    per_dollar: Annotated[bool, typer.Option("--per-dollar", help="The most inputs per dollar.")] = False,
    budget: Annotated[float | None, typer.Option(help="The most dollars per hour.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="No less goodput than without exits, at no more than ALPHA times its cost.")
    ] = None,
    slack: Annotated[float, typer.Option(help="The share of the SLO that is reserved for bursts.")] = 0.2,
    backend: Annotated[
        str, typer.Option(help="Times of this backend, where the profile has several: onnx, torch, graphs, tensorrt.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Times in this precision, where it has several: float16, float32.")] = "",
    no_later: Annotated[
        bool, typer.Option("--no-later", help="No answer takes longer than without exits, whatever the SLO allows.")
    ] = False,
    margin: Annotated[
        float, typer.Option(help="Hold also if this share fewer inputs leave early than expected.")
    ] = 0.0,
    max_batch: Annotated[int, typer.Option(help="The largest batch.")] = 64,
    cut: Annotated[
        str | None, typer.Option(help="Cut before exactly these blocks: 2,4. If not given: where it pays.")
    ] = None,
    max_splits: Annotated[
        int | None, typer.Option(min=1, help="No more splits than this, cut alike in all pipelines.")
    ] = None,
    one_machine: Annotated[bool, typer.Option("--one-machine", help="Devices share a host, not a network.")] = False,
    one_pipeline: Annotated[
        bool, typer.Option("--one-pipeline", help="Chain all kinds of devices: no pipelines side by side.")
    ] = False,
    gap: Annotated[float, typer.Option(help="Stop when no plan can be better by more than this share.")] = 0.0,
    seconds: Annotated[
        float | None, typer.Option(help="Search for about this long, and take the best plan so far, with its gap.")
    ] = None,
    polish: Annotated[
        float | None,
        typer.Option(help="Simulate the plan and similar ones for this many seconds, and take the best of them."),
    ] = None,
    in_time: Annotated[
        float, typer.Option(help="The share of inputs that must be answered in time at the promised rate.")
    ] = 0.99,
    believed: Annotated[
        bool,
        typer.Option("--believed", help="Simulate nothing: promise the planner's own estimate of the goodput."),
    ] = False,
    evaluate: Annotated[Path | None, typer.Option(help="Score this plan instead of searching for one.")] = None,
    surprises: Annotated[bool, typer.Option("--surprises", help="Report the cost of a wrong forecast.")] = False,
    shortfalls: Annotated[
        bool, typer.Option("--shortfalls", help="Report why the plan is below the goodput that no system exceeds.")
    ] = False,
    ttft_ms: Annotated[
        float | None,
        typer.Option(help=f"For a decoder: the time to the first token; {TTFT_MS:g} if not given."),
    ] = None,
    tpot_ms: Annotated[
        float | None,
        typer.Option(help=f"For a decoder: the time from one token to the next; {TPOT_MS:g} if not given."),
    ] = None,
    exits: Annotated[
        str | None, typer.Option(help="For a decoder: recompute, verified, project or off; recompute if not given.")
    ] = None,
    kv_megabytes: Annotated[
        int | None,
        typer.Option(min=1, help="For a decoder: the most memory for KV on a replica; if not given: all there is."),
    ] = None,
    observed: Annotated[
        str | None,
        typer.Option(help="For a decoder: plan for the texts of a running server, by its address or its saved /stats."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the plan; '': no picture.", show_default="beside --out, or plan.png")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> None:
    """Find the best plan for a profile and a fleet, and say how near to the best possible it is proved to be.

    The plan of a decoder says where the network is cut, how many texts are resident, and when its deep part runs. Ways
    to decode are ranked by arithmetic, and the best are simulated; --rate is texts per second, at the least cost.

    Example: [bold]isobatch plan my-llama-ee --ttft-ms 500 --tpot-ms 50 --out plan.json[/]

    Example: [bold]isobatch plan my-llama-ee --observed http://127.0.0.1:8000 --out plan.json[/]

    Example: [bold]isobatch plan --profile bert.json --devices v100=6,p100=8 --slo-ms 100 --out plan.json[/]
    """
    values: dict[str, Any] = dict(locals())
    from cluster.commands import above_0, flag, options_for

    for name in (
        "slo_ms", "rate", "budget", "max_batch", "seconds", "polish", "alpha", "ttft_ms", "tpot_ms",
    ):  # fmt: skip
        above_0(flag(name), values[name])
    if model:
        refusal = "is for classifiers: a decoder is planned by --ttft-ms, --tpot-ms and --rate"
        _plan_decoder(options_for(DecoderPlanOptions, plan, values, refusal))
    else:
        refusal = "is for decoders: name the directory of one"
        _plan_classifier(options_for(ClassifierPlanOptions, plan, values, refusal))


def _plan_decoder(options: DecoderPlanOptions) -> None:
    from rich.console import Console

    from cluster.commands import check_writable
    from cluster.decoding import report
    from cluster.decoding.choice import choose_plan
    from deployments.named import built_in
    from profiles.decoding import as_observed

    goal, out = _decoding_goal(options), options.out
    if out:
        check_writable(out)
    profile = profile_for(built_in(options.model) or options.model, options.profile).for_exits(goal.exits)
    lines = []
    if options.observed:
        texts = report.observed_texts(_stats_at(options.observed), options.observed)
        profile = replace(profile, workload=as_observed(profile.workload, texts))
        goal = replace(goal, texts_per_s=goal.texts_per_s or (texts.texts_per_s if options.min_cost else 0.0))
        lines.append(f"for what was observed: {report.observed_sentence(texts, profile)}")
    with Console(stderr=True).status("planning"):
        choice = choose_plan(profile, _devices(options.devices, profile), goal)
    if out:
        out.write_text(choice.plan.to_json() + "\n")
        lines.append(f"written to {out}; isobatch serve {options.model} --plan {out}")
    if options.as_json:
        print(json.dumps(report.plan_as_json(choice), indent=2))
        return
    console = Console(soft_wrap=True, markup=False)
    console.print(report.plan_table(choice, profile))
    for line in lines:
        console.print(line, highlight=False)


def _decoding_goal(options: DecoderPlanOptions) -> "DecodingGoal":
    from optimizer.decoding import DecodingGoal

    if options.min_cost and options.rate is None and not options.observed:
        raise UserError("--min-cost needs --rate, or --observed: the least cost of how many texts per second?")
    exits = options.exits or "recompute"
    if exits not in ("recompute", "verified", "project", "off"):
        raise UserError(f"--exits {exits!r} must be recompute, verified, project or off")
    if not 0 < options.in_time < 1:
        raise UserError(f"--in-time {options.in_time} must be between 0 and 1: the share of texts that keep each limit")
    ttft_s, tpot_s = (options.ttft_ms or TTFT_MS) / 1e3, (options.tpot_ms or TPOT_MS) / 1e3
    return DecodingGoal(ttft_s, tpot_s, options.rate or 0.0, exits, options.in_time, options.kv_megabytes)


def profile_for(source: Path, file: Path | None) -> "DecoderProfile":
    """The profile in a file, or the one that `isobatch profile` has kept of a decoder's checkpoint."""
    from deployments.decoding.config import cached_profile
    from deployments.decoding.ramp_rules import is_decoder
    from deployments.folders import weights_of
    from profiles.decoding import load_decoder_profile
    from profiles.files import differ

    if not is_decoder(source):
        raise UserError(f"{source} is no directory of a decoder; other networks are planned by --profile alone")
    path = file or cached_profile(source)
    if file is None and not path.exists():
        raise UserError(f"{source} was not measured here yet: isobatch profile {source}")
    profile = load_decoder_profile(path)
    if differ(profile.weights, weights_of(source)):
        raise UserError(f"{path} is of other weights than those in {source}: isobatch profile {source}")
    return profile


def _stats_at(source: str) -> Any:
    """The `/stats` of the server at an address, or those in a file."""
    from cluster.commands.status import ask

    if source.startswith(("http://", "https://")):
        return ask(f"{source.rstrip('/')}/stats", None)
    try:
        return json.loads(read_text(Path(source)))
    except ValueError as error:
        raise UserError(f"--observed {source}: these are no /stats of a decoder: {error!r}") from None


def _devices(fleet_text: str | None, profile: "DecoderProfile") -> "tuple[Device, ...]":
    """The fleet that the user names, or one device of the kind that was measured."""
    from profiles.devices import fleet

    if fleet_text:
        return fleet(fleet_text)
    measured = next((table for table in profile.tables if not table.estimated), None)
    if measured is None:
        raise UserError("nothing was measured, so say which devices there are: --devices KIND=COUNT")
    return fleet(f"{measured.kind}=1")


def _plan_classifier(options: ClassifierPlanOptions) -> None:
    from rich.console import Console

    from cluster.commands import check_writable, plan_report
    from cluster.commands.plan_result import plan_result, settled_result
    from optimizer.pipelines.baselines import no_later
    from optimizer.pipelines.batch_gain import batch_gains
    from profiles.files import load

    if options.profile is None or options.devices is None:
        raise UserError("--profile and --devices are needed: only a decoder's directory can do without")
    out, picture = options.out, options.picture
    picture = (out or Path("plan.json")).with_suffix(".png") if picture is None else picture
    for path in filter(None, (out, picture if picture.name else None)):
        check_writable(path)
    profile = load(options.profile)
    exits, problem_for = _problems(options, profile, options.devices)
    objective, simulate = _objective(options), _simulation(options)
    within = no_later(problem_for(exits.survival), objective) if options.no_later else objective
    result_for = partial(
        plan_result,
        objective=within,
        alpha=options.alpha,
        gap=options.gap,
        apart=not options.one_pipeline,
        file=options.evaluate,
        max_splits=options.max_splits,
    )
    with Console(stderr=True).status("planning"):
        result = settled_result(exits, problem_for, result_for, partial(_effort, options.seconds, exits), simulate)
        not_simulated = _reason_not_simulated(result, bool(simulate), options.believed)
        result = replace(result, not_simulated=not_simulated, batch_gains=tuple(batch_gains(result.facts, within)))
    if out:
        named = replace(result.plan, model=profile.model, weights=profile.weights, slo_s=objective.slo_s)
        out.write_text(named.to_json() + "\n")
    if picture.name:
        from cluster.commands.plan_picture import draw

        draw(result, picture)
    if options.as_json:
        print(json.dumps(result.as_json(), indent=2))
        return
    console = Console()
    for table in plan_report.tables(result, objective, options.surprises, options.shortfalls):
        console.print(table)
    files = [f"written to {out}"] if out else []
    files += [f"the picture is {picture}"] if picture.name else []
    if files:
        console.print("; ".join(files), highlight=False, soft_wrap=True)


def _problems(
    options: ClassifierPlanOptions, profile: "Profile", devices: str
) -> "tuple[ExitProfile, Callable[[tuple[float, ...]], Problem]]":
    """The share of inputs that leave at each ramp, and the function from the survival to the planning problem."""
    from optimizer import problem, read_plan
    from optimizer.sensitivity import surprised
    from profiles.devices import fleet, links_between

    kinds, scored = fleet(devices), read_plan(options.evaluate) if options.evaluate else None
    backend = options.backend or (scored.backend if scored else "")
    dtype = options.dtype or (scored.dtype if scored else "")
    measured = profile.on(backend, dtype)
    for device in kinds:
        measured.check_has(device.kind, backend, dtype)
    if not 0 <= options.margin <= 1:
        raise UserError(f"--margin {options.margin} must be between 0 and 1: the share of leavers that may stay")
    length = scored.length if scored else measured.length
    links = links_between(kinds, one_machine=options.one_machine)

    def problem_for(survival: tuple[float, ...]) -> "Problem":
        worse = surprised(survival, options.margin) if measured.exits and options.margin else None
        return problem(measured, kinds, links, survival, worse, length)

    return measured.exits_of(length), problem_for


def _objective(options: ClassifierPlanOptions) -> "Objective":
    from optimizer import Objective

    if options.min_cost and options.per_dollar:
        raise UserError("--min-cost and --per-dollar are two goals: choose one")
    if options.min_cost and options.rate is None:
        raise UserError("--min-cost needs --rate: the least cost of how many inputs per second?")
    try:
        return Objective(
            goal="cost" if options.min_cost else "goodput-per-dollar" if options.per_dollar else "goodput",
            slo_s=None if options.slo_ms is None else options.slo_ms / 1e3,
            slack=options.slack,
            goodput_per_s=options.rate or 0.0,
            cost_per_hour=options.budget,
            max_batch=options.max_batch,
            cuts=_cuts(options.cut, options.max_splits),
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _effort(seconds: float | None, exits: "ExitProfile") -> "Effort":
    """The effort of one search; where the exits depend on the plan, there are several searches."""
    from optimizer.effort import EFFORT
    from optimizer.tuning import TURNS

    searches = TURNS if exits.sure else 1
    return EFFORT if seconds is None else replace(EFFORT, out_of_time=_after(seconds / searches))


def _simulation(options: ClassifierPlanOptions) -> "Simulate | None":
    """The function that simulates the plan and similar ones; None where no plan is simulated.

    Without --polish no plan is simulated if it comes from a file, or if its search is slow or limited in time.
    """
    from cluster.simulator.choice import DEFAULT_EFFORT, LONG_EFFORT, best_simulated, can_simulate

    in_time, polish = options.in_time, options.polish
    if not 0 < in_time < 1:
        raise UserError(f"--in-time {in_time} must be between 0 and 1: the share of inputs that are answered in time")
    if polish and options.believed:
        raise UserError("--polish simulates plans, --believed simulates none: choose one")
    slow_or_given = options.evaluate or options.max_splits or options.seconds or options.one_pipeline
    if not polish and (options.believed or slow_or_given):
        return None

    def simulate(plan: "Plan", problem: "Problem", objective: "Objective", find: "Find") -> "SimulatedChoice | None":
        """The time of `--polish` begins when there is a plan."""
        if polish:
            effort = replace(LONG_EFFORT, in_time=in_time, out_of_time=_after(polish))
        else:
            effort = replace(DEFAULT_EFFORT, in_time=in_time)
            if not can_simulate(plan, problem, objective, effort):
                return None
        return best_simulated(plan, problem, objective, find, effort, not options.one_pipeline)

    return simulate


def _reason_not_simulated(result: "PlanResult", may_be_simulated: bool, believed: bool) -> str:
    """Why the plan was not simulated; empty where it was."""
    from cluster.simulator.choice import why_not_simulated

    if result.simulated:
        return ""
    if may_be_simulated:
        return why_not_simulated(result.plan, result.facts, result.objective)
    if believed:
        return "--believed"
    return "with --evaluate, --max-splits, --one-pipeline or --seconds, only --polish SECONDS simulates"


def _after(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def _cuts(text: str | None, max_splits: int | None = None) -> tuple[int, ...] | None:
    """
    >>> _cuts("4, 2"), _cuts(None)
    ((2, 4), None)
    """
    if text and max_splits:
        raise UserError("--cut and --max-splits are two ways to say where to cut: choose one")
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--cut {text!r} must be numbers of blocks above 0, as in 2,4")
    return tuple(sorted({int(part) for part in parts}))
