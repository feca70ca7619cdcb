"""`isobatch profile` of a decoder: launches of its engine are timed, and the price of each part is fitted to them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from isobatch.cluster.profiling.block_times import source_of, uncatalogued
from isobatch.cluster.profiling.launch_prices import estimated_table, front_s_per_token, measured
from isobatch.deployments.decoding.anatomy import anatomy_of
from isobatch.deployments.decoding.config import cached_profile
from isobatch.deployments.decoding.engine_setup import kv_bytes, load_decoder, usual_dtype
from isobatch.deployments.decoding.ramp_rules import DecoderRules, check_decoder, rules_of
from isobatch.deployments.folders import locked, weights_of
from isobatch.deployments.models.backends import compute_with, warn_of_ramp_dtype
from isobatch.deployments.models.loading import resolve_device
from isobatch.deployments.named import built_in
from isobatch.deployments.progress import busy
from isobatch.deployments.sources import title_of
from isobatch.profiles.devices import kind_of, known_kinds
from isobatch.profiles.errors import UserError
from isobatch.profiles.measure import device_name
from isobatch.profiles.text_profile import (
    DecoderProfile,
    DecodingTable,
    DecodingWorkload,
    load_text_profile,
    save_text_profile,
)

if TYPE_CHECKING:
    from isobatch.cluster.commands.profile import ProfileOptions

ASSUMED_TOKENS = 128  # of a prompt, and of the text after it


def profile_texts(options: "ProfileOptions", source: Path) -> None:
    """Write `out`, and keep the same profile where `isobatch plan` looks for it."""
    console, kinds = Console(soft_wrap=True, markup=False), known_kinds(options.devices)
    check_decoder(source)
    weights, paths = weights_of(source), (options.out, cached_profile(source))
    name = source.name if built_in(options.model) else title_of(options.model)
    device = str(resolve_device(options.device))
    dtype = options.dtype or usual_dtype(source, device)
    model = load_decoder(source, device, dtype)
    anatomy = anatomy_of(model)
    shape = anatomy.shape
    for path in paths:  # before anything is timed
        if path.exists():
            load_text_profile(path).check_same(name, shape.num_blocks, weights)
    rules = rules_of(source, shape.num_blocks)
    if rules.ramps:
        warn_of_ramp_dtype(source, rules.dtype, dtype)
    workload = workload_of(rules, source, shape.reads)
    own = _measured_table(console, source, model, workload, device, dtype, options)
    others = [kind for kind in kinds if kind != own.kind]
    tables = (own, *(replace(_estimated(model.config, kind, dtype), front_s=own.front_s) for kind in others))
    notes = tuple(f"{table.kind}: {table.source}" for table in tables)
    if rules.lengths is None:
        notes += ("lengths of texts are assumed: prepare measures them, and a controller plans for those of a server",)
    has_encoder = shape.start is not None
    new = DecoderProfile(name, shape.num_blocks, shape.reads, tables, workload, has_encoder, notes, weights)
    for path in paths:
        with locked(path):  # another profile may have ended meanwhile
            before = load_text_profile(path) if path.exists() else None
            save_text_profile(before.joined_by(new) if before else new, path)
    ramps = ", ".join(f"{share:.0%} after block {block}" for block, share in workload.survival) or "no ramps"
    lengths = f"on average {workload.prompt:.0f} tokens of a prompt, and {workload.output:.0f} that are written"
    for line in (*notes, f"tokens that continue: {ramps}", lengths):
        console.print(line, highlight=False)
    console.print(f"written to {options.out}, and kept for isobatch plan {options.model}")


def _estimated(config: Any, kind: str, dtype: str) -> DecodingTable:
    """The table of a kind that is not here, in its fastest precision: but bfloat16 may overflow in float16."""
    table = estimated_table(config, kind)
    return estimated_table(config, kind, dtype) if (table.dtype, dtype) == ("float16", "bfloat16") else table


def _measured_table(
    console: Console, source: Path, model: Any, workload: DecodingWorkload, device: str, dtype: str,
    options: "ProfileOptions",
) -> DecodingTable:  # fmt: skip
    """The prices of launches, fitted to launches that are timed on this device, and what tokens cost the front."""
    compute_with(options.threads)
    anatomy = anatomy_of(model)
    called = device_name(device)
    kind = options.kind or kind_of(called)
    if warning := uncatalogued(kind):
        console.print(warning, highlight=False)
    with busy("timing launches"):
        prices = measured(model, workload, options.timing_s)
    with busy("timing the front"):
        front_s = front_s_per_token(source, anatomy.shape)
    return DecodingTable(
        kind,
        prices.price_s,
        f"{source_of(called, 'torch', dtype, options.threads)}; {prices}",
        kv_bytes(anatomy),
        anatomy.network_bytes,
        dtype,
        error=prices.error,
        bias=prices.bias,
        residents=prices.sequences,
        projects=prices.projects,
        threads=options.threads if device == "cpu" else 1,
        front_s=float(f"{front_s:.3g}"),
    )


def workload_of(rules: DecoderRules, source: Path, reads: int) -> DecodingWorkload:
    """The lengths of texts, and the tokens that leave at each ramp, as `isobatch prepare` measured them.

    For a network that is not prepared, a length is assumed: a prompt and its text each fill a quarter of its context,
    up to `ASSUMED_TOKENS`.
    """
    if rules.lengths is None:
        return DecodingWorkload((), (assumed := (max(1, min(ASSUMED_TOKENS, reads // 4)),)), assumed)
    survival = tuple((ramp.block, ramp.survival) for ramp in rules.all_ramps if ramp.survival is not None)
    agreement = min((ramp.exit_agreement for ramp in rules.ramps if ramp.exit_agreement is not None), default=1.0)
    projected = ((rules.ramps[0].block, rules.project.survival),) if rules.project and rules.ramps else ()
    try:
        return DecodingWorkload(survival, rules.lengths.prompts, rules.lengths.outputs, agreement, projected)
    except ValueError as error:
        raise UserError(f"{source}: the lengths in exits.json: {error}") from None
