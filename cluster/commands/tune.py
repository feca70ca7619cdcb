"""`isobatch tune`: chooses thresholds for the ramps that the best plan for a fleet opens."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from isobatch.cluster.commands import METRICS, Metric, above_0
from isobatch.deployments.folders import PLAN, PROFILE
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile, load, save

if TYPE_CHECKING:
    from isobatch.optimizer.tuning import Tuned
    from isobatch.profiles.evidence import Evidence


def tune(
    model: Annotated[Path, typer.Argument(help="Directory that 'isobatch prepare' has written.")],
    profile: Annotated[Path, "How long its blocks take: a file written by 'isobatch profile'."],
    devices: Annotated[str, "The fleet: KIND=COUNT[@DOLLARS PER HOUR],..."],
    out: Annotated[Path, "Directory to write: the checkpoint, its plan.json and its profile.json."],
    slo_ms: Annotated[float | None, "The deadline of every answer; none: answers may take any time."] = None,
    goal: Annotated[
        str, typer.Option(help="goodput, cost, latency or goodput-per-dollar.", metavar="NAME")
    ] = "goodput",
    metric: Annotated[
        Metric | None, typer.Option(help=f"The metric of the promise: {METRICS}.", show_default="as it was prepared")
    ] = None,
    max_batch: Annotated[int, "The largest batch."] = 64,
    one_machine: Annotated[bool, "All devices are in one machine, without a network between them."] = False,
    gap: Annotated[float, "Stop when no plan can be better by more than this share."] = 0.0,
    force: Annotated[bool, "Replace OUT if it is a prepared model."] = False,
) -> None:
    """Choose thresholds and plan together, so that the allowed loss is spent only at ramps that the plan opens.

    The promise of 'isobatch prepare' is tested again, on the same inputs. OUT can be served as any model.

    Example: [bold]isobatch tune my-bert-ee --profile bert.json --devices v100=6 --slo-ms 100 --out my-bert-v100[/]
    """
    from functools import partial

    from isobatch.deployments.prepare.pipeline import check_free
    from isobatch.optimizer import Objective, problem
    from isobatch.optimizer.pipelines.side_by_side import side_by_side
    from isobatch.optimizer.tuning import tuned
    from isobatch.profiles.evidence import EVIDENCE, Evidence

    for option, value in (("--slo-ms", slo_ms), ("--max-batch", max_batch)):
        above_0(option, value)
    check_free(out, force)
    evidence, kinds = Evidence.read(model / EVIDENCE).for_metric(metric), fleet(devices)
    known = load(profile)
    facts = problem(
        known, kinds, links_between(kinds, one_machine=one_machine, measured=known.links), length=known.length
    )
    if facts.num_blocks != (blocks := evidence.test.num_ramps + 1):
        raise UserError(f"{profile} has {facts.num_blocks} blocks, the model {blocks}: profile it first")
    objective = Objective(goal, None if slo_ms is None else slo_ms / 1e3, max_batch=max_batch)
    find = partial(side_by_side, objective=objective, gap=gap)
    console = Console(markup=False)
    with Console(stderr=True).status("planning"):
        result = tuned(facts, objective, evidence, find)
    if result is None:
        console.print("nothing is written: with other thresholds no plan is better within the promise")
        return
    _write(model, out, force, known, evidence, result)
    console.print(_as_text(result), highlight=False)
    console.print(f"written to {out}: a prepared model with its {PLAN} and {PROFILE}")


def _write(model: Path, out: Path, force: bool, known: Profile, evidence: "Evidence", result: "Tuned") -> None:
    from dataclasses import replace

    from isobatch.deployments.prepare import pipeline

    pipeline.tune(model, out, evidence, result.chosen, force)
    # token_exits: with new thresholds, the lengths of the texts that leave are not known.
    save(replace(known, exits=result.exits, token_exits=None), out / PROFILE)
    plan = replace(result.plan, model=known.model, weights=known.weights, length=known.length)
    (out / PLAN).write_text(plan.to_json() + "\n")


def _as_text(result: "Tuned") -> str:
    from isobatch.optimizer.plan import opened

    after, before = result.plan.promise, result.before.promise
    assert after, "This is a bug: the planner promises something of each plan."
    assert before, "This is a bug: the planner promises something of each plan."
    ramps = ", ".join(map(str, opened(result.plan))) or "none"
    return (
        f"{after.goodput_per_s:,.0f} inputs per second; full launches all the way: {1e3 * after.latency_s:.3g} ms\n"
        f"with the previous thresholds: {before.goodput_per_s:,.0f} per second; {1e3 * before.latency_s:.3g} ms\n"
        f"ramps that let inputs leave: after block {ramps}"
    )
