"""isobatch plan: which blocks run where, in how many replicas, at what batch size, and what that promises."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiles.errors import UserError, read_text

if TYPE_CHECKING:
    from optimizer.decoding import DecodingGoal
    from profiles.decoding import DecoderProfile
    from profiles.devices import Device

TTFT_MS = 1000.0  # unless --ttft-ms is given, as a Serve file has it
TPOT_MS = 200.0  # unless --tpot-ms is given


@dataclass(frozen=True)
class _CommonOptions:
    profile: Path | None
    devices: str | None
    rate: float | None
    goal: str | None
    in_time: float
    out: Path | None
    as_json: bool


@dataclass(frozen=True)
class ClassifierPlanOptions(_CommonOptions):
    """The options for a network that classifies."""

    slo_ms: float | None
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
    goal: Annotated[
        str | None,
        typer.Option(help="What the best plan has: a goal by its name; goodput if not given.", metavar="NAME"),
    ] = None,
    min_cost: Annotated[
        bool, typer.Option("--min-cost", help="--goal cost: the fewest dollars that sustain --rate.")
    ] = False,
    per_dollar: Annotated[
        bool, typer.Option("--per-dollar", help="--goal goodput-per-dollar: the most inputs per dollar.")
    ] = False,
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
    values |= {"goal": _goal(goal, min_cost, per_dollar), "min_cost": False, "per_dollar": False}
    if model:
        refusal = "is for classifiers: a decoder is planned by --ttft-ms, --tpot-ms and --rate"
        _plan_decoder(options_for(DecoderPlanOptions, plan, values, refusal))
    else:
        refusal = "is for decoders: name the directory of one"
        _plan_classifier(options_for(ClassifierPlanOptions, plan, values, refusal))


def _goal(goal: str | None, min_cost: bool, per_dollar: bool) -> str | None:
    """The goal by its name, for which --min-cost and --per-dollar are short."""
    names = [goal, "cost" if min_cost else None, "goodput-per-dollar" if per_dollar else None]
    if len(given := [name for name in names if name]) > 1:
        raise UserError("--goal, --min-cost and --per-dollar each name the goal: choose one")
    return next(iter(given), None)


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
        goal = replace(goal, texts_per_s=goal.texts_per_s or (texts.texts_per_s if options.goal == "cost" else 0.0))
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

    if options.goal not in (None, "goodput", "cost"):
        raise UserError(f"--goal {options.goal} is for classifiers: plans of a decoder are for goodput or cost")
    if options.goal == "cost" and options.rate is None and not options.observed:
        raise UserError("the goal cost needs --rate or --observed: how many texts per second must the plan sustain?")
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
    from cluster.commands.plan_search import objective_of, searched
    from profiles.files import load

    if options.profile is None or options.devices is None:
        raise UserError("--profile and --devices are needed: only a decoder's directory can do without")
    out, picture = options.out, options.picture
    picture = (out or Path("plan.json")).with_suffix(".png") if picture is None else picture
    for path in filter(None, (out, picture if picture.name else None)):
        check_writable(path)
    profile, objective = load(options.profile), objective_of(options)
    with Console(stderr=True).status("planning"):
        result = searched(options, options.devices, profile, objective)
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
