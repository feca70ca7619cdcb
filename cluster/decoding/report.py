"""What commands print of a decoder: its plan, a simulated run, and the texts that a server has observed."""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from cluster.decoding.choice import DecodingChoice
from cluster.decoding.simulation import DecodingRun
from optimizer.decoding_plans import terms_of, tokens_per_s
from optimizer.plan import Plan
from profiles.decoding import DecoderProfile, ObservedTexts
from profiles.errors import UserError, first_wrong


def plan_as_json(choice: DecodingChoice) -> dict[str, object]:
    """The plan and its figures, for other programs."""
    run = choice.run
    shares = {"ttft_kept": run.ttft_kept, "tpot_kept": run.tpot_kept, "ceiling_tokens_per_s": choice.ceiling_per_s}
    return {"plan": json.loads(choice.plan.to_json()), "tokens_per_s": tokens_per_s(choice.plan), **shares}


def plan_table(choice: DecodingChoice, profile: DecoderProfile) -> Table:
    """The plan, for people."""
    plan, promise, terms = choice.plan, choice.plan.promise, terms_of(choice.plan)
    assert promise, "This is a bug: a chosen plan makes a promise."
    devices = ", ".join(f"{count} {kind}" for kind, count in plan.devices().items())
    title = ", ".join(f"{pipeline.origin} on {pipeline.placements[0].kind}" for pipeline in plan.pipelines)
    table = Table(title=f"{profile.model}: {title}", title_justify="left", show_header=False)
    table.add_row("devices", f"{devices}, ${promise.cost_per_hour:.4g} per hour")
    for pipeline in plan.pipelines:
        _add_pipeline(table, pipeline, profile, several=bool(plan.beside))
    table.add_row("promise", f"{tokens_per_s(plan):,.0f} tokens/s, {promise.goodput_per_s:,.4g} texts/s")
    ttft = f"TTFT {1e3 * terms.ttft_s:g} ms for {choice.run.ttft_kept:.1%}"
    table.add_row("in time, simulated", f"{ttft}, TPOT {1e3 * terms.tpot_s:g} ms for {choice.run.tpot_kept:.1%}")
    ceiling = f"{choice.ceiling_per_s:,.0f} tokens/s: replicas that are never idle, without limits on TTFT and TPOT"
    origin = f"by arithmetic over {choice.num_ways:,} ways to decode, or by a simulation"
    table.add_row("ceiling", f"{ceiling}, {origin}; the promise is {promise.gap:.0%} below")
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


def run_sentence(run: DecodingRun) -> str:
    """How a simulated run kept its limits, and where its tokens left."""
    tokens = sum(run.exits.values()) or 1
    exits = ", ".join(f"{count / tokens:.1%} after block {block}" for block, count in sorted(run.exits.items()))
    return (
        f"TTFT of {1e3 * run.ttft_s:g} ms kept for {run.ttft_kept:.1%} of the texts, "
        f"TPOT of {1e3 * run.tpot_s:g} ms for {run.tpot_kept:.1%}; "
        f"tokens known: {exits}; {run.preempted} times a text lost its pages and began again"
    )


def observed_sentence(observed: ObservedTexts, profile: DecoderProfile) -> str:
    """The texts that a server has observed; `profile` has their lengths already."""
    workload = profile.workload
    shares = [f"{observed.survival(block):.0%} go on after block {block}" for block in observed.ramps]
    return (
        f"{observed.texts_per_s:.3g} texts/s, on average {workload.prompt:.0f} tokens of a prompt and "
        f"{workload.output:.0f} that are written (of the latest {len(observed.outputs)}); "
        f"{', '.join(shares) or 'no exits'}"
    )


def observed_texts(stats: Any, source: str | Path) -> ObservedTexts:
    """The texts in a decoder's `/stats`, which were read from `source`."""
    try:
        texts = {**stats["workload"], "ramps": stats["ramps"], "exits": list(stats["exits"].items())}
        return TypeAdapter(ObservedTexts).validate_python(texts)
    except ValidationError as error:
        raise UserError(f"--observed {source}: {first_wrong(error).reason}") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"--observed {source}: these are no /stats of a decoder: {error!r}") from None
