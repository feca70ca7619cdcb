"""`isobatch tune`: chooses thresholds for the ramps that the best plan for a fleet opens."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from isobatch.cluster.commands import METRICS, Metric, above_0, check_not_replaced, number_text
from isobatch.cluster.commands.plan import ClassifierPlanOptions
from isobatch.deployments.folders import PLAN, PROFILE, ramps_of, weights_of
from isobatch.profiles.devices import fleet
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile, differ, load, save, write_whole

if TYPE_CHECKING:
    from isobatch.optimizer import Plan, Problem
    from isobatch.optimizer.tuning import Tuned
    from isobatch.profiles.evidence import Evidence


def tune(
    model: Annotated[Path, typer.Argument(help="Directory that 'isobatch prepare' has written.")],
    profile: Annotated[Path, "How long its blocks take: a file written by 'isobatch profile'."],
    devices: Annotated[str, "The fleet, as in a100=6,t4=15@0.45 (dollars per hour)."],
    out: Annotated[Path, "Directory to write: the checkpoint, its plan.json and its profile.json."],
    slo_ms: Annotated[float | None, "The deadline of every answer; none: answers may take any time."] = None,
    goal: Annotated[str, typer.Option(help="goodput, latency or goodput-per-dollar.", metavar="NAME")] = "goodput",
    metric: Annotated[
        Metric | None, typer.Option(help=f"The metric of the promise: {METRICS}.", show_default="as it was prepared")
    ] = None,
    max_batch: Annotated[int | None, "The largest batch; none: the largest that was timed."] = None,
    one_machine: Annotated[bool, "All devices are in one machine, without a network between them."] = False,
    no_later: Annotated[bool, "No longer p99 latency than without exits, whatever the SLO allows."] = False,
    gap: Annotated[float, "Stop when no plan can be better by more than this share."] = 0.0,
    no_simulation: Annotated[bool, "Simulate nothing: compare plans by the planner's own estimates."] = False,
    force: Annotated[bool, "Replace OUT if it is a prepared model."] = False,
) -> None:
    """Choose thresholds and plan together, so that the allowed loss is spent only at ramps that the plan opens.

    The promise of 'isobatch prepare' is tested again, on the same inputs. OUT can be served as any model.

    Example: [bold]isobatch tune my-bert-ee --profile bert.json --devices a100=6 --slo-ms 100 --out my-bert-a100[/]
    """
    from isobatch.cluster.commands.plan_search import named, problem_of
    from isobatch.deployments.prepare.pipeline import check_free
    from isobatch.optimizer.goals import GOALS
    from isobatch.profiles.evidence import EVIDENCE, Evidence

    for option, value in (("--slo-ms", slo_ms), ("--max-batch", max_batch)):
        above_0(option, value)
    if goal in GOALS and GOALS[goal].at_given_goodput:
        raise UserError(f"--goal {goal} is for 'isobatch plan': give goodput, latency or goodput-per-dollar")
    check_free(out, force)
    check_not_replaced(out, model, profile)
    if not (model / EVIDENCE).is_file():
        raise UserError(f"{model} has no {EVIDENCE}: 'isobatch prepare' writes a directory with one, 'cascade' none")
    evidence, known = Evidence.read(model / EVIDENCE).for_metric(metric), load(profile)
    options = ClassifierPlanOptions(
        slo_ms=slo_ms, goal=goal, max_batch=max_batch, one_machine=one_machine, no_later=no_later, gap=gap,
        no_simulation=no_simulation,
    )  # fmt: skip
    if differ(known.weights, weights_of(model)):
        raise UserError(f"{profile} is of {known.model}, whose weights are others: profile {model} first")
    facts = problem_of(options, fleet(devices), known)
    if facts.num_blocks != (blocks := evidence.test.num_ramps + 1):
        raise UserError(f"{profile} has {facts.num_blocks} blocks, the model {blocks}: profile it first")
    result = tuned_with(options, facts, evidence)
    console = Console(markup=False)
    if result is None:
        console.print("nothing is written: with other thresholds no plan is better within the promise")
        return
    plan = named(facts.annotated(result.plan), known, slo_ms and slo_ms / 1e3)
    _write(model, out, force, known, evidence, replace(result, plan=plan))
    console.print(_as_text(result), highlight=False)
    console.print(f"written to {out}: a prepared model with its {PLAN} and {PROFILE}")


def tuned_with(options: ClassifierPlanOptions, facts: "Problem", evidence: "Evidence") -> "Tuned | None":
    """Thresholds and a plan for these options of `isobatch plan`."""
    from functools import partial

    from isobatch.cluster.commands.plan_search import LivePlan, found_in_time, objective_of, simulation
    from isobatch.optimizer.pipelines.baselines import no_later
    from isobatch.optimizer.tuning import tuned

    objective = objective_of(options)
    within = no_later(facts, objective) if options.no_later else objective
    with LivePlan() as live:
        simulate, find = simulation(options, live), partial(found_in_time, live)

        def rehearse(plan: "Plan", facts: "Problem") -> "Plan":
            better = simulate(plan, facts, within, find) if simulate else None
            return better.plan if better else plan

        return tuned(facts, within, evidence, partial(find, objective=within, gap=options.gap), rehearse, live.is_over)


def _write(model: Path, out: Path, force: bool, known: Profile, evidence: "Evidence", result: "Tuned") -> None:
    from isobatch.deployments.prepare import pipeline

    pipeline.tune(model, out, evidence, result.chosen, force)
    # token_exits: with new thresholds, the lengths of the texts that leave are not known.
    save(replace(known, exits=result.exits, token_exits=None, ramps=ramps_of(out)), out / PROFILE)
    write_whole(out / PLAN, result.plan.to_json())


def _as_text(result: "Tuned") -> str:
    from isobatch.optimizer.plan import milliseconds, opened

    after, before = result.plan.promise, result.before.promise
    assert after, "This is a bug: the planner promises something of each plan."
    assert before, "This is a bug: the planner promises something of each plan."
    ramps = ", ".join(map(str, opened(result.plan))) or "none"
    per_s, before_per_s = number_text(after.goodput_per_s), number_text(before.goodput_per_s)
    return (
        f"{per_s} inputs per second; full launches all the way: {milliseconds(after.latency_s)}\n"
        f"with the previous thresholds: {before_per_s} per second; {milliseconds(before.latency_s)}\n"
        f"ramps that let inputs leave: after block {ramps}"
    )
