"""`isobatch profile`: how long a network's blocks take on this machine, and where its inputs leave."""

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
    TextColumn,
    columns_of,
)
from deployments.named import known_backend
from profiles.errors import UserError

LENGTHS = [32, 128]  # that are measured where nothing says how long texts are

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.profiling.checkpoint import SampleInputs
    from deployments.models.interface import ServedModel
    from deployments.prepare.data import Columns
    from profiles.exits import ExitProfile
    from profiles.files import Profile
    from profiles.latency import LatencyTable
    from profiles.lengths import Lengths
    from profiles.measure import CountedExits


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
    max_rows: Annotated[int, typer.Option(min=1, help="Count exits over a sample of at most so many of them.")] = 2000,
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

    Of a decoder, launches of its engine are timed, and what each part of one costs is fitted to them.

    Example: [bold]isobatch profile my-bert-ee --data reviews.csv --budget 60[/]
    """
    import torch
    from rich.console import Console

    from cluster.commands import check_writable
    from cluster.commands.profile_decoder import DecoderProfiling
    from cluster.profiling.checkpoint import (
        in_batches,
        kind_of,
        picture_path,
        source_of,
        timed,
        timed_stretches,
        uncatalogued,
        with_sure,
    )
    from deployments.decoding.checkpoint import is_decoder
    from deployments.folders import weights_of
    from deployments.models import checkpoint, load_served
    from deployments.models.backends import INT8, make_ready, on_backend, weights_dtype
    from profiles.files import Profile
    from profiles.files import load as load_profile
    from profiles.measure import count_exits, device_name
    from profiles.model import edges_of
    from profiles.picture import draw

    known_backend(backend)
    tokens, others = _lengths(lengths) if lengths else [], _kinds(devices)
    check_writable(out)
    located = checkpoint.locate(model)
    if is_decoder(located):
        for_classifiers = {
            "--backend": (backend, "torch"),
            "--data": (data, None),
            "--lengths": (lengths, None),
            "--largest": (largest, 64),
            "--max-rows": (max_rows, 2000),
        }
        where = _device(device)
        DecoderProfiling(located, out, where, dtype, budget, threads, kind, others, for_classifiers).run(
            Console(soft_wrap=True, markup=False), model
        )
        return
    torch.set_num_threads(threads)
    console = Console(soft_wrap=True, markup=False)
    known = load_profile(out) if out.exists() else None
    wanted = columns_of(text_column, text_pair_column, image_column, label_column, columns, delimiter, encoding)
    recorded = _recorded(console, model, data, wanted, max_rows) if data else []
    exact = load_served(model, device=device, dtype=weights_dtype(dtype))
    weights = weights_of(checkpoint.locate(model))
    if known:
        known.check_same(Path(model).name, exact.num_blocks, weights)
    where = str(exact.device)
    called = device_name(where)
    here = kind or kind_of(called)
    if warning := uncatalogued(here):
        console.print(warning, highlight=False)
    exits, told = (None, ()) if known and known.exits else _prepared_exits(exact)
    network = on_backend(exact, model, backend, int8=dtype == INT8)
    make_ready(network, model, timed_stretches(network))
    found = _lengths_of(network, recorded)
    inputs = _inputs(network, model, tokens, found)
    derived = _derived(network, model, [each for each in others if each != here], inputs)
    source = source_of(called, network.backend, dtype, threads)
    measured = timed(network, inputs, here, source, where, budget, largest, dtype)
    interrupted = any(each.interrupted for each in measured)
    by_tokens = None
    if data and not interrupted:
        counted = count_exits(network, in_batches(network, recorded))
        exits, by_tokens, interrupted = counted.exits, counted.by_tokens, counted.interrupted
        told = (f"exits: {_counted(counted, recorded)} of {data.name}", *_told(found, data))
    exits, by_tokens = (
        each and with_sure(each, checkpoint.locate(model), exact.ramps.rules) for each in (exits, by_tokens)
    )
    notes = (*(str(each) for each in measured), *told)
    tables = (*(each.table for each in measured), *derived)
    new = Profile(Path(model).name, tables, exits, notes, weights, found, by_tokens, edges_of(network))
    _add(new, out)
    draw(new, picture_path(out))
    _tell(console, new, out)
    if interrupted:
        raise typer.Exit(130)


def _add(new: "Profile", out: Path) -> None:
    """Add it to what the file holds by now, as another profile may have ended meanwhile."""
    from deployments.folders import alone
    from profiles.files import load, save

    with alone(out):
        save(load(out).joined_by(new) if out.exists() else new, out)


def _device(told: str) -> str:
    """Where a decoder computes, as its configuration names it."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if told == "auto" else told


def _tell(console: "Console", new: "Profile", out: Path) -> None:
    from cluster.profiling.checkpoint import picture_path, report
    from profiles.picture import name

    console.print(report(new))
    if told := [f"{name(each)} ({each.backend} {each.dtype}, {each.origin})" for each in new.tables if each.derived]:
        console.print(f"not measured: {'; '.join(told)}", highlight=False)
    for note in new.notes:
        console.print(note, highlight=False)
    console.print(f"written to {out}; the picture is {picture_path(out)}")


def _lengths(text: str) -> list[int]:
    """
    >>> _lengths("32, 128")
    [32, 128]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--lengths {text!r} must be numbers of tokens, as in 32,128")
    return [int(part) for part in parts]


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


def _lengths_of(network: "ServedModel", recorded: list[Any]) -> "Lengths | None":
    """How long the recorded texts are; None where there are none."""
    from profiles.lengths import Lengths

    lengths = network.encode(recorded).lengths if recorded and network.reads_text else None
    return None if lengths is None else Lengths.of(lengths.tolist())


def _counted(counted: "CountedExits", recorded: list[Any]) -> str:
    if not counted.interrupted:
        return f"counted over {counted.inputs} inputs"
    return f"WARNING: interrupted: counted over {counted.inputs} of {len(recorded)} inputs"


def _told(lengths: "Lengths | None", data: Path) -> tuple[str, ...]:
    if lengths is None:
        return ()
    shortest, longest = lengths.tokens[0], lengths.tokens[-1]
    return (f"lengths: {lengths.mean} tokens on average in {data.name}, {shortest} to {longest}: plans count tokens",)


def _inputs(network: "ServedModel", model: str, lengths: list[int], found: "Lengths | None") -> "list[SampleInputs]":
    """Texts of each of these lengths; where none are asked for, as long as those that were recorded."""
    from cluster.profiling.checkpoint import images, texts, texts_like
    from deployments.models import checkpoint

    folder = checkpoint.locate(model)
    if not checkpoint.reads_images(folder):
        return [texts_like(network, found)] if found and not lengths else list(texts(network, lengths or LENGTHS))
    side, channels = checkpoint.image_size(folder)
    return [images(network, side, channels)]


def _derived(
    network: "ServedModel", model: str, kinds: list[str], inputs: "list[SampleInputs]"
) -> "list[LatencyTable]":
    """Tables that nobody measured, at the lengths that are measured here."""
    from cluster.profiling.datasheets import checkpoint_tables
    from deployments.models import checkpoint

    folder = checkpoint.locate(model)
    side = checkpoint.image_size(folder)[0] if checkpoint.reads_images(folder) else 0
    lengths = [each.length for each in inputs]
    return checkpoint_tables(folder, kinds, lengths, side, network.ramp_blocks)


def _prepared_exits(network: "ServedModel") -> "tuple[ExitProfile | None, tuple[str, ...]]":
    """The exits that 'isobatch prepare' measured, used where no data is given, and a note on where they come from."""
    from cluster.profiling.checkpoint import exits_from_rules

    rules = [(rule.block, rule.survival) for rule in network.ramps.rules.ramps]
    if not rules:
        return None, ()
    exits = exits_from_rules(rules, network.num_blocks)
    if exits:
        return exits, ("exits: as 'isobatch prepare' measured them; --data counts them over your own inputs",)
    return None, ("exits: WARNING: not known, so a plan takes it that nobody leaves early; give --data",)


def _recorded(console: "Console", model: str, data: Path, columns: "Columns", max_rows: int) -> list[Any]:
    """A sample of a file's inputs, read before anything is timed, so that a wrong one is found at once."""
    from deployments.models import checkpoint
    from deployments.prepare.data import rows, taken
    from deployments.prepare.sample import sampled

    located = checkpoint.locate(model)
    channels, pairs = checkpoint.channels_of(located), not checkpoint.task_at(located).by_token
    console.print(taken(data, columns, channels=channels, pairs=pairs), highlight=False)
    values = sampled((row.value for row in rows(data, columns, channels=channels, pairs=pairs)), max_rows)
    if not values:
        raise UserError(f"{data} holds no inputs")
    return values
