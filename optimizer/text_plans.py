"""Plans that write texts: how replicas write in a chosen way, on one kind of device or on several side by side."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

from isobatch.optimizer.plan import DecodingTerms, Placement, Plan, Split
from isobatch.optimizer.text_paces import MEGABYTE, OFF, PAGE, DecodingFacts, DecodingGoal, DecodingWay


def plan_of(way: DecodingWay, facts: DecodingFacts, goal: DecodingGoal, replicas: int) -> Plan:
    """The plan by which replicas write in this way; it promises nothing yet."""
    profile = facts.profile
    cuts, waits = tuple[int, ...](), way.residents
    if way.cut < profile.num_blocks:
        survival, cuts = profile.workload.after(way.cut - 1), (way.cut,)
        waits = min(way.residents, max(1, round(way.residents * (1 - (1 - survival) ** way.launches))))
    splits = splits_at(cuts, profile.num_blocks, way.residents, waits)
    prompt, output = profile.workload.longest
    position_bytes = facts.position_bytes * (1 + profile.has_encoder)  # with an encoder, of its source and of the text
    longest_bytes = profile.reads * position_bytes + PAGE * facts.position_bytes
    room = facts.kv_bytes(goal)
    kv_bytes = min(room, max(way.residents * (prompt + output + PAGE) * facts.position_bytes, longest_bytes))
    fitting = max(2, kv_bytes // position_bytes // PAGE * PAGE)  # the longest text whose KV fits, in whole pages
    terms = DecodingTerms(
        exits=goal.exits if len(splits) > 1 else OFF,
        prompt_rows=way.prompt_rows,
        kv_megabytes=ceil(kv_bytes / MEGABYTE),
        ttft_s=goal.ttft_s,
        tpot_s=goal.tpot_s,
        max_context=None if room >= longest_bytes else fitting,
        threads=facts.table.threads,
    )
    table = facts.table
    return Plan(
        (Placement(facts.device.kind, replicas, splits, local=len(splits) > 1),),
        model=profile.model,
        weights=profile.weights,
        backend="torch",
        dtype=table.dtype,
        origin="estimated" if table.estimated else "measured",
        decoding=terms,
    )


def splits_at(cuts: Sequence[int], num_blocks: int, residents: int, deep: int) -> tuple[Split, ...]:
    """The splits of a network that is cut behind the ramps before these blocks; `deep`: the batch of all but the first
    split."""
    return tuple(
        Split(start, stop, deep if start else residents, (stop - 1,) if stop < num_blocks else ())
        for start, stop in pairwise((0, *cuts, num_blocks))
    )


def writes_texts(plan: Plan) -> bool:
    """Whether this is a plan for a network that writes texts."""
    return plan.decoding is not None


def with_terms(plan: Plan, terms: DecodingTerms) -> Plan:
    return replace(plan, decoding=terms)


def terms_of(plan: Plan) -> DecodingTerms:
    """How a pipeline's replicas write texts."""
    assert plan.decoding, "This is a bug: it is a plan for a network that classifies."
    return plan.decoding


def exits_of(plan: Plan) -> str:
    """What exits mean in this plan: the same in all pipelines that are cut."""
    return next((exits for each in plan.pipelines if (exits := terms_of(each).exits) != OFF), OFF)


def on_terms(plan: Plan, of: Callable[[Plan], DecodingTerms]) -> Plan:
    """The same plan with new terms for each of its pipelines, as `of` gives them."""
    first, *others = (with_terms(each, of(each)) for each in plan.pipelines)
    return replace(first, beside=tuple(others))


def tokens_per_s(plan: Plan) -> float:
    """The promised tokens per second of all pipelines."""
    return sum(terms_of(each).tokens_per_s for each in plan.pipelines)


def promising(plan: Plan, tokens: float) -> Plan:
    """The same plan with another promise of tokens per second, shared among its pipelines in the same proportion."""
    factor = tokens / tokens_per_s(plan)
    return on_terms(plan, lambda each: replace(terms_of(each), tokens_per_s=factor * terms_of(each).tokens_per_s))


def shares_of(plan: Plan) -> list[float]:
    """The weights by which pipelines share the texts: their promises, or their residents where one promises nothing."""
    promised = [terms_of(each).tokens_per_s for each in plan.pipelines]
    return promised if all(promised) else [float(residents_of(each)) for each in plan.pipelines]


def emptiest_first(texts: Sequence[int], shares: Sequence[float]) -> list[int]:
    """The pipelines in the order in which they would finish the next text, given the texts that each has.

    >>> emptiest_first([2, 1], [3.0, 1.0]), emptiest_first([3, 0], [3.0, 1.0])
    ([0, 1], [1, 0])
    """
    return sorted(range(len(texts)), key=lambda place: (texts[place] + 1) / shares[place])


def residents_of(plan: Plan) -> int:
    """Texts that all replicas write at once."""
    return sum(each.placements[0].replicas * each.splits[0].batch_size for each in plan.pipelines)
