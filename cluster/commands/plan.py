"""isobatch plan: which blocks run where, in how many replicas, at what batch size, and what that promises."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiles.errors import UserError

if TYPE_CHECKING:
    from cluster.commands.plan_result import PlanResult, Play
    from cluster.simulator.choice import Find, SimulatedChoice
    from optimizer import Objective, Plan, Problem
    from optimizer.effort import Effort
    from profiles.exits import ExitProfile


def plan(
    model: Annotated[
        Path | None,
        typer.Argument(help="The directory of a decoder, or llm-demo; of other networks --profile tells enough."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="What was measured: a file written by 'isobatch profile'. Of a decoder it is kept."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="The fleet: KIND=COUNT[@DOLLARS PER HOUR],... Of a decoder, if not given: one of what was measured."
        ),
    ] = None,
    slo_ms: Annotated[
        float | None, typer.Option(help="Every answer within this time; none: however long it takes.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Inputs per second that must be sustained; none: as many as can be.")
    ] = None,
    min_cost: Annotated[bool, typer.Option("--min-cost", help="The cheapest devices that sustain --rate.")] = False,
    per_dollar: Annotated[bool, typer.Option("--per-dollar", help="The most inputs per dollar.")] = False,
    budget: Annotated[float | None, typer.Option(help="At most so many dollars per hour.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="No less goodput than without exits, at no more than ALPHA times its cost.")
    ] = None,
    slack: Annotated[float, typer.Option(help="The share of the SLO that is kept for bursts.")] = 0.2,
    backend: Annotated[
        str, typer.Option(help="Times of this backend, where the profile has several: onnx, torch, graphs, tensorrt.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Times in this precision, where it has several: float16, float32.")] = "",
    no_later: Annotated[
        bool, typer.Option("--no-later", help="No answer takes longer than without exits, whatever the SLO allows.")
    ] = False,
    margin: Annotated[float, typer.Option(help="Hold also when this share fewer inputs leave than expected.")] = 0.0,
    max_batch: Annotated[int, typer.Option(help="No larger batches than this.")] = 64,
    cut: Annotated[str | None, typer.Option(help="Cut before exactly these blocks: 2,4. None: where it pays.")] = None,
    max_splits: Annotated[
        int | None, typer.Option(min=1, help="No more splits than this, cut alike in all pipelines.")
    ] = None,
    one_machine: Annotated[bool, typer.Option("--one-machine", help="Devices share a host, not a network.")] = False,
    one_pipeline: Annotated[
        bool, typer.Option("--one-pipeline", help="Chain all kinds of devices: no pipelines side by side.")
    ] = False,
    gap: Annotated[float, typer.Option(help="Stop when no plan can be better by more than this share.")] = 0.0,
    seconds: Annotated[
        float | None, typer.Option(help="Search for about so long, and take the best plan so far, with its gap.")
    ] = None,
    polish: Annotated[
        float | None,
        typer.Option(help="Play the plan and others around it for so many seconds, and take what sustains most."),
    ] = None,
    in_time: Annotated[
        float, typer.Option(help="The share of inputs that must be answered in time at the promised rate.")
    ] = 0.99,
    believed: Annotated[
        bool,
        typer.Option("--believed", help="Play nothing: promise what the devices compute by the planner's beliefs."),
    ] = False,
    evaluate: Annotated[Path | None, typer.Option(help="Score this plan instead of searching one.")] = None,
    surprises: Annotated[bool, typer.Option("--surprises", help="What a wrong forecast would cost.")] = False,
    shortfalls: Annotated[
        bool, typer.Option("--shortfalls", help="What keeps the plan from the goodput that no system exceeds.")
    ] = False,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Of a decoder: a text begins within this time; 1000 if not given.")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Of a decoder: from one token to the next; 200 if not given.")
    ] = None,
    exits: Annotated[
        str | None, typer.Option(help="Of a decoder: recompute, verified, project or off; recompute if not given.")
    ] = None,
    kv_megabytes: Annotated[
        int | None, typer.Option(min=1, help="Of a decoder: a replica's memory for KV, at most; none: all there is.")
    ] = None,
    observed: Annotated[
        str | None,
        typer.Option(help="Of a decoder: plan for what a server has seen, by its address or a file of its /stats."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the plan; '': no picture.", show_default="beside --out, or plan.png")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> None:
    """Find the best plan for a profile and a fleet, and say how near to the best possible it is proved to be.

    Of a decoder: where it is cut, how many texts are resident, when its deep part runs. Ways are ranked by arithmetic,
    and the best are played; --rate is texts per second, at the least cost.

    Example: [bold]isobatch plan my-llama-ee --ttft-ms 500 --tpot-ms 50 --out plan.json[/]

    Example: [bold]isobatch plan my-llama-ee --observed http://127.0.0.1:8000 --out plan.json[/]

    Example: [bold]isobatch plan --profile bert.json --devices v100=6,p100=8 --slo-ms 100 --out plan.json[/]
    """
    from rich.console import Console

    from cluster.commands import above_0, check_writable, plan_report
    from cluster.commands.plan_decoder import DecoderPlanning, goal_of
    from cluster.commands.plan_result import plan_result, settled_result
    from optimizer.pipelines.batch_gain import batch_gains
    from profiles.files import load

    numbers = {"--slo-ms": slo_ms, "--rate": rate, "--budget": budget, "--max-batch": max_batch, "--seconds": seconds}
    numbers |= {"--polish": polish, "--alpha": alpha, "--ttft-ms": ttft_ms, "--tpot-ms": tpot_ms}
    for option, value in numbers.items():
        above_0(option, value)
    of_decoders = {"--ttft-ms": ttft_ms, "--tpot-ms": tpot_ms, "--exits": exits, "--kv-megabytes": kv_megabytes}
    of_decoders |= {"--observed": observed}
    if model:
        for_classifiers = {
            "--slo-ms": (slo_ms, None),
            "--per-dollar": (per_dollar, False),
            "--budget": (budget, None),
            "--alpha": (alpha, None),
            "--slack": (slack, 0.2),
            "--backend": (backend, ""),
            "--dtype": (dtype, ""),
            "--no-later": (no_later, False),
            "--margin": (margin, 0.0),
            "--max-batch": (max_batch, 64),
            "--cut": (cut, None),
            "--max-splits": (max_splits, None),
            "--one-machine": (one_machine, False),
            "--one-pipeline": (one_pipeline, False),
            "--gap": (gap, 0.0),
            "--seconds": (seconds, None),
            "--polish": (polish, None),
            "--believed": (believed, False),
            "--evaluate": (evaluate, None),
            "--surprises": (surprises, False),
            "--shortfalls": (shortfalls, False),
            "--picture": (picture, None),
        }
        goal = goal_of(rate, min_cost, in_time, ttft_ms, tpot_ms, exits, kv_megabytes, bool(observed))
        DecoderPlanning(model, profile, devices, goal, observed, out, as_json, for_classifiers, min_cost).run()
        return
    profile, devices = _given(profile, devices, of_decoders)
    picture = (out or Path("plan.json")).with_suffix(".png") if picture is None else picture
    for written in filter(None, (out, picture if picture.name else None)):
        check_writable(written)
    who_leaves, facts_of = _question(profile, devices, one_machine, margin, evaluate, backend, dtype)
    objective = _objective(slo_ms, rate, min_cost, per_dollar, budget, slack, max_batch, _cuts(cut, max_splits))
    slow_or_given = bool(evaluate or max_splits or seconds or one_pipeline)
    play = _player(polish, in_time, not one_pipeline, believed, slow_or_given)
    within, apart = _in_time(objective, facts_of(who_leaves.survival), no_later), not one_pipeline
    result = partial(
        plan_result, objective=within, alpha=alpha, gap=gap, apart=apart, file=evaluate, max_splits=max_splits
    )
    with Console(stderr=True).status("planning"):
        found = settled_result(who_leaves, facts_of, result, partial(_effort, seconds, who_leaves), play)
        gains = tuple(batch_gains(found.facts, within))
        found = replace(found, unplayed=_unplayed(found, bool(play), believed), batch_gains=gains)
    if out:
        known = load(profile)
        named = replace(found.plan, model=known.model, weights=known.weights, slo_s=objective.slo_s)
        out.write_text(named.to_json() + "\n")
    if picture.name:
        from cluster.commands.plan_picture import draw

        draw(found, picture)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
        return
    console = Console()
    for table in plan_report.tables(found, objective, surprises, shortfalls):
        console.print(table)
    files = [f"written to {out}"] if out else []
    files += [f"the picture is {picture}"] if picture.name else []
    if files:
        console.print("; ".join(files), highlight=False, soft_wrap=True)


def _given(profile: Path | None, devices: str | None, of_decoders: Mapping[str, object]) -> tuple[Path, str]:
    """What a plan for a network that classifies needs."""
    if told := next((option for option, value in of_decoders.items() if value is not None), None):
        raise UserError(f"{told} is for decoders: name the directory of one")
    if profile is None or devices is None:
        raise UserError("--profile and --devices are needed: only a decoder's directory can do without")
    return profile, devices


def _question(
    profile: Path, devices: str, one_machine: bool, margin: float, scored: Path | None, backend: str, dtype: str
) -> "tuple[ExitProfile, Callable[[tuple[float, ...]], Problem]]":
    """Who leaves where, and the facts for a survival."""
    from optimizer import problem, read_plan
    from optimizer.sensitivity import surprised
    from profiles.devices import fleet, links_between
    from profiles.files import load

    kinds, made = fleet(devices), read_plan(scored) if scored else None
    if made:
        backend, dtype = backend or made.backend, dtype or made.dtype
    known = load(profile).on(backend, dtype)
    for device in kinds:
        known.check_has(device.kind, backend, dtype)
    if not 0 <= margin <= 1:
        raise UserError(f"--margin {margin} must be between 0 and 1: the share of leavers that may stay")
    length = made.length if made else known.length
    links = links_between(kinds, one_machine=one_machine)

    def facts(survival: tuple[float, ...]) -> "Problem":
        worse = surprised(survival, margin) if known.exits and margin else None
        return problem(known, kinds, links, survival, worse, length)

    return known.exits_of(length), facts


def _objective(
    slo_ms: float | None, rate: float | None, min_cost: bool, per_dollar: bool, budget: float | None, slack: float,
    max_batch: int, cuts: tuple[int, ...] | None,
) -> "Objective":  # fmt: skip
    from optimizer import Objective

    if min_cost and per_dollar:
        raise UserError("--min-cost and --per-dollar are two goals: choose one")
    if min_cost and rate is None:
        raise UserError("--min-cost needs --rate: the least cost of how many inputs per second?")
    try:
        return Objective(
            goal="cost" if min_cost else "goodput-per-dollar" if per_dollar else "goodput",
            slo_s=None if slo_ms is None else slo_ms / 1e3,
            slack=slack,
            goodput_per_s=rate or 0.0,
            cost_per_hour=budget,
            max_batch=max_batch,
            cuts=cuts,
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def _in_time(objective: "Objective", facts: "Problem", no_later: bool) -> "Objective":
    from optimizer.pipelines import baselines

    return baselines.no_later(facts, objective) if no_later else objective


def _effort(seconds: float | None, who_leaves: "ExitProfile") -> "Effort":
    """Of one search; where who leaves depends on the plan, there are several."""
    from optimizer.effort import EFFORT
    from optimizer.tuning import TURNS

    searches = TURNS if who_leaves.sure else 1
    return EFFORT if seconds is None else replace(EFFORT, out_of_time=_after(seconds / searches))


def _player(polish: float | None, in_time: float, apart: bool, believed: bool, slow_or_given: bool) -> "Play | None":
    """What plays the plan and others. Nothing is played where that would take long, or would not tell what was asked.

    `slow_or_given`: a plan is given, or finding one is slow or has its time, so that it is played only where that is
    asked for.
    """
    from cluster.simulator.choice import CARE, PATIENT, is_playable, played

    if not 0 < in_time < 1:
        raise UserError(f"--in-time {in_time} must be between 0 and 1: the share of inputs that are answered in time")
    if polish and believed:
        raise UserError("--polish plays plans, --believed plays none: choose one")

    def play(plan: "Plan", facts: "Problem", objective: "Objective", find: "Find") -> "SimulatedChoice | None":
        """The time of `--polish` begins when there is a plan."""
        if polish:
            care = replace(PATIENT, in_time=in_time, out_of_time=_after(polish))
        else:
            care = replace(CARE, in_time=in_time)
            if not is_playable(plan, facts, objective, care):
                return None
        return played(plan, facts, objective, find, care, apart)

    return play if polish or not (believed or slow_or_given) else None


def _unplayed(found: "PlanResult", may_be_played: bool, believed: bool) -> str:
    """Why nothing was played, in words; empty where it was."""
    from cluster.simulator.choice import unplayable

    if found.played:
        return ""
    if may_be_played:
        return unplayable(found.plan, found.facts, found.objective)
    if believed:
        return "--believed"
    return "with --evaluate, --max-splits, --one-pipeline or --seconds, only --polish SECONDS plays"


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
