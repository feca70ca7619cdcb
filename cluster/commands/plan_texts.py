"""The plan of a decoder: from the options of `isobatch plan` to its output."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from isobatch.cluster.commands import check_writable
from isobatch.cluster.simulator.text_choice import DecodingChoice, choose_plan
from isobatch.deployments.decoding.config import cached_profile
from isobatch.deployments.decoding.ramp_rules import DecoderRules, check_decoder, is_decoder
from isobatch.deployments.folders import weights_of
from isobatch.deployments.progress import busy
from isobatch.deployments.sources import as_url, local
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.text_plans import DecodingGoal, terms_of, tokens_per_s
from isobatch.profiles.devices import Device, as_text, fleet
from isobatch.profiles.errors import UserError, read_model
from isobatch.profiles.files import differ, write_whole
from isobatch.profiles.promise import RULES
from isobatch.profiles.text_profile import PROJECT, DecoderProfile, load_text_profile

if TYPE_CHECKING:
    from isobatch.cluster.commands.plan import DecoderPlanOptions


def plan_decoder(options: "DecoderPlanOptions") -> None:
    goal, out = _decoding_goal(options), options.out
    if out:
        check_writable(out, options.profile)
    assert options.model, "This is a bug: without a directory, a classifier is planned."
    profile = profile_for(local(as_url(options.model)), options.profile, goal.exits)
    with busy("planning"):
        choice = choose_plan(profile, _devices(options.devices, profile), goal)
    if out:
        write_whole(out, choice.plan.to_json())
    if options.as_json:
        shares = {name: getattr(choice.run, name) for name in ("ttft_kept", "tpot_kept")}
        figures = {"tokens_per_s": tokens_per_s(choice.plan), **shares, "ceiling_tokens_per_s": choice.ceiling_per_s}
        print(json.dumps({"plan": json.loads(choice.plan.to_json()), **figures}, indent=2))
        return
    console = Console(soft_wrap=True, markup=False)
    console.print(plan_table(choice, profile))
    if out:
        console.print(f"written to {out}; isobatch serve {options.model} --plan {out}", highlight=False)


def plan_table(choice: DecodingChoice, profile: DecoderProfile) -> Table:
    plan, promise, terms = choice.plan, choice.plan.promise, terms_of(choice.plan)
    assert promise, "This is a bug: a chosen plan makes a promise."
    title = ", ".join(f"{pipeline.origin} on {pipeline.placements[0].kind}" for pipeline in plan.pipelines)
    table = Table(title=f"{profile.model}: {title}", title_justify="left", show_header=False)
    table.add_row("devices", f"{as_text(plan.devices())}, ${promise.cost_per_hour:.4g} per hour")
    for pipeline in plan.pipelines:
        _add_pipeline(table, pipeline, profile, several=bool(plan.beside))
    table.add_row("promise", f"{tokens_per_s(plan):,.0f} tokens/s, {promise.goodput_per_s:,.4g} texts/s")
    ttft = f"TTFT {1e3 * terms.ttft_s:g} ms for {choice.run.ttft_kept:.1%}"
    table.add_row("in time, simulated", f"{ttft}, TPOT {1e3 * terms.tpot_s:g} ms for {choice.run.tpot_kept:.1%}")
    ceiling = f"{choice.ceiling_per_s:,.0f} tokens/s: replicas that are never idle, without limits on TTFT and TPOT"
    origin = f"by arithmetic over {choice.num_ways:,} ways to decode, or by a simulation"
    above = f"; it is {promise.gap:.0%} above the promise" if promise.gap < 1 else ""  # a given rate may be far below
    table.add_row("ceiling", f"{ceiling}, {origin}{above}")
    return table


def _add_pipeline(table: Table, pipeline: Plan, profile: DecoderProfile, several: bool) -> None:
    terms, splits, (placement,) = terms_of(pipeline), pipeline.splits, pipeline.placements
    if several:
        table.add_row("", f"on each {placement.kind}, {terms.tokens_per_s:,.0f} tokens/s of all of them")
    if len(splits) > 1:
        table.add_row("cut", f"behind block {splits[0].ramps[0]} of {pipeline.num_blocks} ({terms.exits})")
        table.add_row("deep part", f"runs when {splits[1].batch_size} of {splits[0].batch_size} residents wait for it")
    else:
        table.add_row("cut", "nowhere: every token runs through the whole network")
    timed = profile.table(placement.kind).residents
    limit = f" (no larger launch than {timed} was timed)" if timed else ""
    table.add_row("residents", f"{splits[0].batch_size} a replica{limit}, {terms.kv_megabytes} MB for their KV")
    table.add_row("prompts", f"at most {terms.prompt_rows} tokens of prompts in one launch")


def _decoding_goal(options: "DecoderPlanOptions") -> DecodingGoal:
    if options.goal not in (None, "goodput", "cost"):
        raise UserError(f"--goal {options.goal} is for classifiers: plans of a decoder are for goodput or cost")
    if options.goal == "cost" and options.rate is None:
        raise UserError("the goal cost needs --rate: how many texts per second must the plan sustain?")
    if options.goal == "goodput" and options.rate is not None:
        raise UserError("--goal goodput is not for a rate, which is sustained at the least cost: leave one of them out")
    if options.exits not in ("recompute", "verified", "project", "off"):
        raise UserError(f"--exits {options.exits!r} must be recompute, verified, project or off")
    if not 0 < options.in_time < 1:
        raise UserError(f"--in-time {options.in_time} must be between 0 and 1: the share of texts that keep each limit")
    ttft_s, tpot_s = options.ttft_ms / 1e3, options.tpot_ms / 1e3
    return DecodingGoal(ttft_s, tpot_s, options.rate or 0.0, options.exits, options.in_time, options.kv_megabytes)


def profile_for(source: Path, file: Path | None, exits: str) -> DecoderProfile:
    """The profile for this way of exits: in a file, or the one that `isobatch profile` has kept of a decoder's
    checkpoint."""
    if not source.is_dir():
        raise UserError(f"{source}: no such directory; give that of a decoder, or a fleet's file (*.yaml)")
    if not is_decoder(source):
        raise UserError(f"{source} is not the directory of a decoder; other networks are planned with --profile")
    check_decoder(source)
    path = file or cached_profile(source)
    if file is None and not path.exists():
        raise UserError(f"{source} was not measured here yet: run {_steps(source, exits)}")
    profile = load_text_profile(path)
    if differ(profile.weights, weights_of(source)):
        raise UserError(f"{path} is of other weights than those in {source}: isobatch profile {source}")
    return profile.for_exits(exits)


def _steps(source: Path, exits: str) -> str:
    """The commands that a plan of a network without a profile needs, in order."""
    rules = source / RULES
    if exits != PROJECT or (rules.exists() and read_model(rules, DecoderRules).project):
        return f"isobatch profile {source}"
    return (
        f"isobatch prepare {source} --data FILE --out OUT, isobatch profile OUT and isobatch plan OUT --exits project"
    )


def _devices(fleet_text: str | None, profile: DecoderProfile) -> tuple[Device, ...]:
    """The fleet that the user names, or one device of the kind that was measured."""
    if fleet_text:
        return fleet(fleet_text)
    measured = next((table for table in profile.tables if not table.estimated), None)
    if measured is None:
        raise UserError("nothing was measured, so say which devices there are: --devices KIND=COUNT")
    return fleet(f"{measured.kind}=1")
