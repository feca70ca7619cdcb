"""`isobatch profile` for a decoder: what its launches cost here, and what clients have it write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from profiles.errors import UserError

if TYPE_CHECKING:
    from deployments.decoding.anatomy import DecoderAnatomy
    from deployments.decoding.checkpoint import DecoderRules
    from profiles.decoding import DecoderProfile, DecodingTable, DecodingWorkload


@dataclass(frozen=True)
class DecoderProfiling:
    """What the user says of a decoder. `given` has the options for classifiers by name: (value, default)."""

    source: Path
    out: Path
    device: str
    dtype: str
    budget: float
    threads: int
    kind: str | None
    devices: Sequence[str]
    given: Mapping[str, tuple[object, object]]

    def run(self, console: Console, model: str) -> None:
        """Write `out`, and keep the same where `isobatch plan` looks for it."""
        from cluster.commands import check_not_given
        from deployments.decoding.anatomy import anatomy_of
        from deployments.decoding.checkpoint import check_decoder, rules_of
        from deployments.decoding.config import cached_profile
        from deployments.decoding.loading import load_decoder
        from deployments.folders import alone, weights_of
        from deployments.models.backends import warn_of_ramps
        from deployments.named import built_in
        from profiles.decoding import DecoderProfile, load_decoder_profile, save_decoder_profile

        check_not_given(self.given, "a decoder's workload is what isobatch prepare has measured")
        check_decoder(self.source)
        weights, cached = weights_of(self.source), cached_profile(self.source)
        name = self.source.name if built_in(model) else Path(model).name
        loaded = load_decoder(self.source, self.device, self.dtype)
        anatomy = anatomy_of(loaded)
        for path in (self.out, cached):  # before anything is timed
            if path.exists():
                load_decoder_profile(path).check_same(name, anatomy.shape.num_blocks, weights)
        rules = rules_of(self.source, anatomy.shape.num_blocks)
        if rules.ramps:
            warn_of_ramps(self.source, rules.dtype, self.dtype)
        workload = workload_of(rules, self.source)
        tables = (self._table(console, loaded, anatomy, workload), *self._estimated(loaded.config))
        shape = anatomy.shape
        notes = tuple(f"{table.kind}: {table.source}" for table in tables)
        encoder = shape.start is not None
        new = DecoderProfile(name, shape.num_blocks, shape.reads, tables, workload, encoder, notes, weights)
        for path in (self.out, cached):
            with alone(path):  # another profile may have ended meanwhile
                before = load_decoder_profile(path) if path.exists() else None
                save_decoder_profile(before.joined_by(new) if before else new, path)
        console.print(summary(new), highlight=False)
        console.print(f"written to {self.out}, and kept for isobatch plan {model}")

    def _table(
        self, console: Console, model: Any, anatomy: "DecoderAnatomy", workload: "DecodingWorkload"
    ) -> "DecodingTable":
        import torch

        from cluster.profiling.checkpoint import kind_of, source_of, uncatalogued
        from cluster.profiling.decoding import measured, weights_bytes
        from deployments.decoding.loading import kv_bytes
        from profiles.decoding import DecodingTable
        from profiles.measure import device_name

        torch.set_num_threads(self.threads)
        called = device_name(self.device)
        kind = self.kind or kind_of(called)
        if warning := uncatalogued(kind):
            console.print(warning, highlight=False)
        with console.status("timing launches"):
            prices = measured(model, workload, self.budget)
        source = f"{source_of(called, 'torch', self.dtype, self.threads)}; {prices}"
        size = weights_bytes(model)
        return DecodingTable(
            kind,
            prices.price_s,
            source,
            kv_bytes(anatomy),
            size,
            self.dtype,
            error=prices.error,
            bias=prices.bias,
            residents=prices.sequences,
            projects=True,
        )

    def _estimated(self, config: Any) -> "list[DecodingTable]":
        from cluster.profiling.decoding_datasheets import estimated_table

        return [estimated_table(config, kind) for kind in self.devices]


def workload_of(rules: "DecoderRules", source: Path) -> "DecodingWorkload":
    """What isobatch prepare has measured."""
    from profiles.decoding import DecodingWorkload

    if rules.lengths is None:
        raise UserError(
            f"{source} does not say how long prompts and texts are: isobatch prepare {source} --data prompts.csv"
        )
    survival = tuple((ramp.block, ramp.survival) for ramp in rules.all_ramps if ramp.survival is not None)
    agreement = min((ramp.exit_agreement for ramp in rules.ramps if ramp.exit_agreement is not None), default=1.0)
    projected = ((rules.ramps[0].block, rules.project.survival),) if rules.project and rules.ramps else ()
    try:
        return DecodingWorkload(survival, rules.lengths.prompts, rules.lengths.outputs, agreement, projected)
    except ValueError as error:
        raise UserError(f"{source}: the lengths in exits.json: {error}") from None


def summary(profile: "DecoderProfile") -> str:
    workload = profile.workload
    lines = list(profile.notes)
    ramps = ", ".join(f"{share:.0%} after block {block}" for block, share in workload.survival) or "no ramps"
    lines.append(f"tokens that go on: {ramps}")
    lines.append(f"on average {workload.prompt:.0f} tokens of a prompt, and {workload.output:.0f} that are written")
    return "\n".join(lines)
