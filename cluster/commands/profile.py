"""`isobatch profile`: how long a network's blocks take on this machine, and where its inputs leave."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.reading import (
    READS,
    Delimiter,
    Encoding,
    Header,
    ImageColumn,
    LabelColumn,
    PairColumn,
    ReadingOptions,
    TextColumn,
)
from deployments.named import known_backend
from profiles.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.profiling.block_times import SampleInputs
    from deployments.decoding.anatomy import DecoderAnatomy
    from deployments.decoding.ramp_rules import DecoderRules
    from deployments.models.served_model import ServedModel
    from deployments.prepare.data import Columns
    from profiles.exits import ExitProfile
    from profiles.files import Profile
    from profiles.latency import LatencyTable
    from profiles.lengths import Lengths
    from profiles.measure import CountedExits
    from profiles.text_profile import DecoderProfile, DecodingTable, DecodingWorkload


@dataclass(frozen=True)
class _CommonOptions:
    model: str
    out: Path
    device: str
    dtype: str
    budget: float
    threads: int
    kind: str | None
    devices: str


@dataclass(frozen=True)
class ClassifierProfileOptions(_CommonOptions, ReadingOptions):
    """The options for a network that classifies."""

    backend: str
    data: Path | None
    max_rows: int
    lengths: str | None
    largest: int


@dataclass(frozen=True)
class DecoderProfileOptions(_CommonOptions):
    """The options for a decoder, a network that writes texts token by token."""


def profile(
    model: Annotated[
        str,
        typer.Argument(help="Directory or hub id of a checkpoint, prepared or not; demo, llm-demo: the built-in ones."),
    ],
    out: Annotated[Path, typer.Option(help="File to write, or to add this device to.")] = Path("profile.json"),
    device: Annotated[str, typer.Option(help="auto, cpu, or cuda:0.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16, or int8 (CPU, ONNX Runtime).")] = "float32",
    backend: Annotated[
        str,
        typer.Option(help="As `backend:` of `isobatch serve`, which should be the same. auto: the fastest here."),
    ] = "torch",
    data: Annotated[Path | None, typer.Option(help=f"Recorded inputs: counts exits. {READS}.")] = None,
    text_column: TextColumn = None,
    text_pair_column: PairColumn = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    columns: Header = None,
    delimiter: Delimiter = None,
    encoding: Encoding = "utf-8",
    max_rows: Annotated[
        int, typer.Option(min=1, help="Count exits over a sample of at most this many of them.")
    ] = 2000,
    budget: Annotated[
        float, typer.Option(min=0.1, help="Seconds of timing; the first sizes are measured whatever they cost.")
    ] = 60.0,
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens per text to measure at; none: texts as long as those of --data, else 32,128."),
    ] = None,
    largest: Annotated[int, typer.Option(min=1, help="The largest batch to measure.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Host threads; a Ray replica has one per CPU it asks for.")] = 1,
    kind: Annotated[str | None, typer.Option(help="Name of this kind of device, if not the catalogue's.")] = None,
    devices: Annotated[
        str, typer.Option(help="Add tables of these kinds from published times, not measured: v100,p100,k80.")
    ] = "",
) -> None:
    """Measure blocks, ramps and launches at batch sizes from 1 upwards. Ctrl-C keeps what is measured.

    For a decoder, launches of its engine are timed, and the cost of each part of a launch is fitted to them.

    Example: [bold]isobatch profile my-bert-ee --data reviews.csv --budget 60[/]
    """
    values: dict[str, Any] = dict(locals())
    from cluster.commands import check_writable, options_for
    from deployments.decoding.ramp_rules import is_decoder
    from deployments.models import checkpoint

    known_backend(backend)
    check_writable(out)
    source = checkpoint.locate(model)
    if is_decoder(source):
        refusal = "is for classifiers: a decoder's workload is the one that isobatch prepare has measured"
        _profile_decoder(options_for(DecoderProfileOptions, profile, values, refusal), source)
    else:
        _profile_classifier(options_for(ClassifierProfileOptions, profile, values, "is for decoders"), source)


def _profile_classifier(options: ClassifierProfileOptions, source: Path) -> None:
    import torch
    from rich.console import Console

    from cluster.commands import numbers_in
    from cluster.profiling.block_times import (
        in_batches,
        kind_of,
        lengths_of,
        sample_inputs,
        timed,
        timed_block_ranges,
        uncatalogued,
        with_sure,
    )
    from deployments.folders import weights_of
    from deployments.models import load_served
    from deployments.models.backends import INT8, make_ready, on_backend, weights_dtype
    from profiles.files import Profile, load
    from profiles.measure import count_exits, device_name
    from profiles.model import edges_of
    from profiles.picture import draw

    model, data, out, dtype = options.model, options.data, options.out, options.dtype
    tokens = numbers_in("--lengths", options.lengths, int, "numbers of tokens, as in 32,128") if options.lengths else []
    kinds = _kinds(options.devices)
    torch.set_num_threads(options.threads)
    console = Console(soft_wrap=True, markup=False)
    before = load(out) if out.exists() else None
    recorded = _recorded(console, source, data, options.data_columns, options.max_rows) if data else []
    exact = load_served(model, device=options.device, dtype=weights_dtype(dtype))
    weights = weights_of(source)
    if before:
        before.check_same(Path(model).name, exact.num_blocks, weights)
    kind = options.kind or kind_of(device_name(str(exact.device)))
    if warning := uncatalogued(kind):
        console.print(warning, highlight=False)
    exits, exit_notes = (None, ()) if before and before.exits else _prepared_exits(exact)
    network = on_backend(exact, model, options.backend, int8=dtype == INT8)
    make_ready(network, model, timed_block_ranges(network))
    lengths = lengths_of(network, recorded)
    inputs = sample_inputs(network, source, lengths, tokens)
    derived = _derived(network, source, [each for each in kinds if each != kind], inputs)
    measured = timed(network, inputs, kind, dtype, options.budget, options.largest)
    interrupted = any(each.interrupted for each in measured)
    by_tokens = None
    if data and not interrupted:
        counted = count_exits(network, in_batches(network, recorded))
        exits, by_tokens, interrupted = counted.exits, counted.by_tokens, counted.interrupted
        exit_notes = (f"exits: {_counted(counted, recorded)} of {data.name}", *_lengths_note(lengths, data))
    exits, by_tokens = (each and with_sure(each, source, exact.ramps.rules) for each in (exits, by_tokens))
    notes = (*(str(each) for each in measured), *exit_notes)
    tables = (*(each.table for each in measured), *derived)
    new = Profile(Path(model).name, tables, exits, notes, weights, lengths, by_tokens, edges_of(network))
    _add(new, out)
    draw(new, out.with_suffix(".png"))
    _report(console, new, out)
    if interrupted:
        raise typer.Exit(130)


def _profile_decoder(options: DecoderProfileOptions, source: Path) -> None:
    """Write `out`, and keep the same profile where `isobatch plan` looks for it."""
    from rich.console import Console

    from cluster.profiling.launch_estimates import estimated_table
    from deployments.decoding.anatomy import anatomy_of
    from deployments.decoding.config import cached_profile
    from deployments.decoding.engine_setup import load_decoder
    from deployments.decoding.ramp_rules import check_decoder, rules_of
    from deployments.folders import locked, weights_of
    from deployments.models.backends import warn_of_ramp_dtype
    from deployments.named import built_in
    from profiles.text_profile import DecoderProfile, load_text_profile, save_text_profile

    console, kinds = Console(soft_wrap=True, markup=False), _kinds(options.devices)
    check_decoder(source)
    weights, paths = weights_of(source), (options.out, cached_profile(source))
    name = source.name if built_in(options.model) else Path(options.model).name
    device = _device(options.device)
    model = load_decoder(source, device, options.dtype)
    anatomy = anatomy_of(model)
    shape = anatomy.shape
    for path in paths:  # before anything is timed
        if path.exists():
            load_text_profile(path).check_same(name, shape.num_blocks, weights)
    rules = rules_of(source, shape.num_blocks)
    if rules.ramps:
        warn_of_ramp_dtype(source, rules.dtype, options.dtype)
    workload = workload_of(rules, source)
    measured = _measured_table(console, model, anatomy, workload, device, options)
    tables = (measured, *(estimated_table(model.config, kind) for kind in kinds))
    notes = tuple(f"{table.kind}: {table.source}" for table in tables)
    has_encoder = shape.start is not None
    new = DecoderProfile(name, shape.num_blocks, shape.reads, tables, workload, has_encoder, notes, weights)
    for path in paths:
        with locked(path):  # another profile may have ended meanwhile
            before = load_text_profile(path) if path.exists() else None
            save_text_profile(before.joined_by(new) if before else new, path)
    console.print(_decoder_summary(new), highlight=False)
    console.print(f"written to {options.out}, and kept for isobatch plan {options.model}")


def _measured_table(
    console: "Console", model: Any, anatomy: "DecoderAnatomy", workload: "DecodingWorkload", device: str,
    options: DecoderProfileOptions,
) -> "DecodingTable":  # fmt: skip
    """The prices of launches, fitted to launches that are timed on this device."""
    import torch

    from cluster.profiling.block_times import kind_of, source_of, uncatalogued
    from cluster.profiling.launch_prices import measured, weights_bytes
    from deployments.decoding.engine_setup import kv_bytes
    from profiles.measure import device_name
    from profiles.text_profile import DecodingTable

    torch.set_num_threads(options.threads)
    called = device_name(device)
    kind = options.kind or kind_of(called)
    if warning := uncatalogued(kind):
        console.print(warning, highlight=False)
    with console.status("timing launches"):
        prices = measured(model, workload, options.budget)
    return DecodingTable(
        kind,
        prices.price_s,
        f"{source_of(called, 'torch', options.dtype, options.threads)}; {prices}",
        kv_bytes(anatomy),
        weights_bytes(model),
        options.dtype,
        error=prices.error,
        bias=prices.bias,
        residents=prices.sequences,
        projects=True,
    )


def workload_of(rules: "DecoderRules", source: Path) -> "DecodingWorkload":
    """The lengths of texts, and the tokens that leave at each ramp, as `isobatch prepare` measured them."""
    from profiles.text_profile import DecodingWorkload

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


def _decoder_summary(profile: "DecoderProfile") -> str:
    workload = profile.workload
    ramps = ", ".join(f"{share:.0%} after block {block}" for block, share in workload.survival) or "no ramps"
    lengths = f"on average {workload.prompt:.0f} tokens of a prompt, and {workload.output:.0f} that are written"
    return "\n".join([*profile.notes, f"tokens that go on: {ramps}", lengths])


def _add(new: "Profile", out: Path) -> None:
    """Add a profile to a file, to which another command may have added one meanwhile."""
    from deployments.folders import locked
    from profiles.files import load, save

    with locked(out):
        save(load(out).joined_by(new) if out.exists() else new, out)


def _device(device: str) -> str:
    """The device of a decoder, as its configuration names it."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _report(console: "Console", new: "Profile", out: Path) -> None:
    from cluster.profiling.block_times import report
    from profiles.picture import name

    console.print(report(new))
    if derived := [f"{name(each)} ({each.backend} {each.dtype}, {each.origin})" for each in new.tables if each.derived]:
        console.print(f"not measured: {'; '.join(derived)}", highlight=False)
    for note in new.notes:
        console.print(note, highlight=False)
    console.print(f"written to {out}; the picture is {out.with_suffix('.png')}")


def _kinds(text: str) -> list[str]:
    """
    >>> _kinds("V100, k80"), _kinds("")
    (['v100', 'k80'], [])
    """
    from profiles.devices import known_kind

    kinds = [part.strip().lower() for part in text.split(",") if part.strip()]
    for kind in kinds:
        known_kind(kind)
    return kinds


def _counted(counted: "CountedExits", recorded: list[Any]) -> str:
    if not counted.interrupted:
        return f"counted over {counted.inputs} inputs"
    return f"WARNING: interrupted: counted over {counted.inputs} of {len(recorded)} inputs"


def _lengths_note(lengths: "Lengths | None", data: Path) -> tuple[str, ...]:
    if lengths is None:
        return ()
    shortest, longest = lengths.tokens[0], lengths.tokens[-1]
    return (f"lengths: {lengths.mean} tokens on average in {data.name}, {shortest} to {longest}: plans count tokens",)


def _derived(
    network: "ServedModel", source: Path, kinds: list[str], inputs: "list[SampleInputs]"
) -> "list[LatencyTable]":
    """Tables of kinds of devices that are not measured, at the lengths that are measured on this device."""
    from cluster.profiling.datasheets import checkpoint_tables
    from deployments.models import checkpoint

    side = checkpoint.image_size(source)[0] if checkpoint.reads_images(source) else 0
    return checkpoint_tables(source, kinds, [each.length for each in inputs], side, network.ramp_blocks)


def _prepared_exits(network: "ServedModel") -> "tuple[ExitProfile | None, tuple[str, ...]]":
    """The exits that 'isobatch prepare' measured, used where no data is given, and a note on where they come from."""
    from cluster.profiling.block_times import exits_from_rules

    rules = [(rule.block, rule.survival) for rule in network.ramps.rules.ramps]
    if not rules:
        return None, ()
    exits = exits_from_rules(rules, network.num_blocks)
    if exits:
        return exits, ("exits: as 'isobatch prepare' measured them; --data counts them over your own inputs",)
    return None, ("exits: WARNING: not known, so a plan assumes that no input leaves early; give --data",)


def _recorded(console: "Console", source: Path, data: Path, columns: "Columns", max_rows: int) -> list[Any]:
    """A sample of a file's inputs, read before anything is timed, so that a wrong file is refused at once."""
    from deployments.models import checkpoint
    from deployments.prepare.data import rows, taken
    from deployments.prepare.sample import sampled

    channels, pairs = checkpoint.channels_of(source), not checkpoint.task_at(source).by_token
    console.print(taken(data, columns, channels=channels, pairs=pairs), highlight=False)
    values = sampled((row.value for row in rows(data, columns, channels=channels, pairs=pairs)), max_rows)
    if not values:
        raise UserError(f"{data} holds no inputs")
    return values
