"""`isobatch plan DIR` for a decoder: where it is cut, who is resident, and when its deep part runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from profiles.errors import UserError, first_wrong, read_text

if TYPE_CHECKING:
    from cluster.decoding.choice import DecodingChoice
    from optimizer.decoding import DecodingGoal
    from optimizer.plan import Plan
    from profiles.decoding import DecoderProfile, ObservedTexts
    from profiles.devices import Device


@dataclass(frozen=True)
class DecoderPlanning:
    """What the user says of a decoder. `given` has the options for classifiers by name: (value, default)."""

    source: Path
    profile: Path | None
    devices: str | None
    goal: "DecodingGoal"
    observed: str | None
    out: Path | None
    as_json: bool
    given: Mapping[str, tuple[object, object]]
    min_cost: bool = False

    def run(self) -> None:
        """Find the plan, write it, and say what it promises."""
        from cluster.commands import check_not_given, check_writable
        from cluster.decoding.choice import chosen
        from deployments.named import built_in
        from profiles.decoding import as_observed

        check_not_given(self.given, "a decoder is planned by --ttft-ms, --tpot-ms and --rate")
        if self.out:
            check_writable(self.out)
        known = profile_for(built_in(self.source) or self.source, self.profile).under(self.goal.exits)
        goal = self.goal
        if self.observed:
            seen = observed_texts(self.observed)
            known = replace(known, workload=as_observed(known.workload, seen))
            goal = replace(goal, texts_per_s=goal.texts_per_s or (seen.texts_per_s if self.min_cost else 0.0))
        with Console(stderr=True).status("planning"):
            found = chosen(known, self._fleet(known), goal)
        if self.out:
            self.out.write_text(found.plan.to_json() + "\n")
        if self.as_json:
            print(json.dumps(figures(found), indent=2))
            return
        console = Console(soft_wrap=True, markup=False)
        console.print(told(found, known))
        if self.observed:
            console.print(f"for what was observed: {seen_in_words(seen, known)}", highlight=False)
        if self.out:
            console.print(f"written to {self.out}; isobatch serve {self.source} --plan {self.out}", highlight=False)

    def _fleet(self, known: "DecoderProfile") -> "tuple[Device, ...]":
        """The devices that the user names, or one of that which was measured."""
        from profiles.devices import fleet

        if self.devices:
            return fleet(self.devices)
        measured = next((table for table in known.tables if not table.estimated), None)
        if measured is None:
            raise UserError("nothing was measured, so say which devices there are: --devices KIND=COUNT")
        return fleet(f"{measured.kind}=1")


def profile_for(source: Path, told: Path | None) -> "DecoderProfile":
    """The profile of this name, or that which is kept of a checkpoint."""
    from deployments.decoding.checkpoint import is_decoder
    from deployments.decoding.config import cached_profile
    from deployments.folders import weights_of
    from profiles.decoding import load_decoder_profile
    from profiles.files import differ

    if not is_decoder(source):
        raise UserError(f"{source} is no directory of a decoder; other networks are planned by --profile alone")
    path = told or cached_profile(source)
    if told is None and not path.exists():
        raise UserError(f"{source} was not measured here yet: isobatch profile {source}")
    known = load_decoder_profile(path)
    if differ(known.weights, weights_of(source)):
        raise UserError(f"{path} is of other weights than those in {source}: isobatch profile {source}")
    return known


def observed_texts(source: str) -> "ObservedTexts":
    """What a server tells of its clients: at its address, or in a file of its `/stats`."""
    from pydantic import TypeAdapter

    from cluster.commands.status import ask
    from profiles.decoding import ObservedTexts

    at_server = source.startswith(("http://", "https://"))
    try:
        told = ask(f"{source.rstrip('/')}/stats", None) if at_server else json.loads(read_text(Path(source)))
        found = {**told["workload"], "ramps": told["ramps"], "exits": list(told["exits"].items())}
        return TypeAdapter(ObservedTexts).validate_python(found)
    except ValidationError as error:
        raise UserError(f"--observed {source}: {first_wrong(error).reason}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"--observed {source}: these are no /stats of a decoder: {error!r}") from None


def seen_in_words(seen: "ObservedTexts", known: "DecoderProfile") -> str:
    workload = known.workload
    ramps = ", ".join(f"{seen.survival(block):.0%} go on after block {block}" for block in seen.ramps) or "no exits"
    return (
        f"{seen.texts_per_s:.3g} texts/s, on average {workload.prompt:.0f} tokens of a prompt and "
        f"{workload.output:.0f} that are written (of the latest {len(seen.outputs)}); {ramps}"
    )


def figures(found: "DecodingChoice") -> dict[str, object]:
    """What another program may want to know."""
    from optimizer.decoding_plans import tokens_per_s

    run = found.run
    kept = {"ttft_kept": run.ttft_kept, "tpot_kept": run.tpot_kept, "ceiling_tokens_per_s": found.ceiling_per_s}
    return {"plan": json.loads(found.plan.to_json()), "tokens_per_s": tokens_per_s(found.plan), **kept}


def told(found: "DecodingChoice", known: "DecoderProfile") -> Table:
    """The plan in words."""
    from optimizer.decoding_plans import terms_of, tokens_per_s

    plan, promise, terms = found.plan, found.plan.promise, terms_of(found.plan)
    assert promise, "This is a bug: what is chosen makes a promise."
    devices = ", ".join(f"{count} {kind}" for kind, count in plan.devices().items())
    title = ", ".join(f"{each.origin} on {each.placements[0].kind}" for each in plan.pipelines)
    shown = Table(title=f"{known.model}: {title}", title_justify="left", show_header=False)
    shown.add_row("devices", f"{devices}, ${promise.cost_per_hour:.4g} per hour")
    for each in plan.pipelines:
        _show(shown, each, known.table(each.placements[0].kind).residents, several=bool(plan.beside))
    shown.add_row("promise", f"{tokens_per_s(plan):,.0f} tokens/s, {promise.goodput_per_s:,.4g} texts/s")
    limits = f"TTFT {1e3 * terms.ttft_s:g} ms for {found.run.ttft_kept:.1%}, "
    shown.add_row("in time, played", limits + f"TPOT {1e3 * terms.tpot_s:g} ms for {found.run.tpot_kept:.1%}")
    arithmetic = f"by arithmetic over {found.looked_at:,} ways, or played"
    most = f"{found.ceiling_per_s:,.0f} tokens/s: never idle, no limits, {arithmetic}"
    shown.add_row("ceiling", f"{most}; the promise is {promise.gap:.0%} below")
    return shown


def _show(shown: Table, pipeline: "Plan", timed: int | None, several: bool) -> None:
    """How one pipeline decodes; `timed`: residents of the largest launch that was."""
    from optimizer.decoding_plans import terms_of

    terms, splits, (placement,) = terms_of(pipeline), pipeline.splits, pipeline.placements
    if several:
        shown.add_row("", f"on each {placement.kind}, {terms.tokens_per_s:,.0f} tokens/s of all of them")
    if len(splits) > 1:
        shown.add_row("cut", f"behind block {splits[0].ramps[0]} of {pipeline.num_blocks} ({terms.exits})")
        shown.add_row("deep part", f"runs when {splits[1].batch_size} of {splits[0].batch_size} residents wait for it")
    else:
        shown.add_row("cut", "nowhere: every token runs through the whole network")
    limit = f" (no launch of more than {timed} was timed)" if timed else ""
    shown.add_row("residents", f"{splits[0].batch_size} a replica{limit}, {terms.kv_megabytes} MB for their KV")
    shown.add_row("prompts", f"{terms.prompt_rows} tokens of them in one launch")


def goal_of(
    rate: float | None,
    min_cost: bool,
    in_time: float,
    ttft_ms: float | None,
    tpot_ms: float | None,
    exits: str | None,
    kv_megabytes: int | None,
    observed: bool = False,
) -> "DecodingGoal":
    """What is wanted; what is not said is as isobatch serve has it."""
    from optimizer.decoding import DecodingGoal

    if min_cost and rate is None and not observed:
        raise UserError("--min-cost needs --rate, or --observed: the least cost of how many texts per second?")
    if exits not in (None, "recompute", "verified", "project", "off"):
        raise UserError(f"--exits {exits!r} must be recompute, verified, project or off")
    if not 0 < in_time < 1:
        raise UserError(f"--in-time {in_time} must be between 0 and 1: the share of texts that keep each limit")
    return DecodingGoal(
        (ttft_ms or 1000.0) / 1e3, (tpot_ms or 200.0) / 1e3, rate or 0.0, exits or "recompute", in_time, kv_megabytes
    )
