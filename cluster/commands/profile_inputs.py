"""`isobatch profile` of a network that classifies: its blocks are timed, and its exits counted.

With --links, the cost of moving survivors is added to a profile that has the times of this device.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from isobatch.cluster.commands import INTERRUPTED, numbers_in
from isobatch.cluster.commands.shared_options import check_no_file, check_unread
from isobatch.cluster.profiling import block_times
from isobatch.cluster.profiling.datasheets import checkpoint_tables
from isobatch.cluster.profiling.links import between_nodes, in_one_machine, sizes_up_to
from isobatch.cluster.profiling.together import TimedNetwork, check_can_share, shared_tables
from isobatch.cluster.serving.local import attached
from isobatch.deployments.folders import locked, ramps_of, weights_of
from isobatch.deployments.models import checkpoint, load_served
from isobatch.deployments.models.backends import compute_with, weights_dtype
from isobatch.deployments.models.loading import resolve_device
from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.named import AUTO
from isobatch.deployments.precision import own_precisions
from isobatch.deployments.prepare.data import Row, name_of, naming_rows
from isobatch.deployments.prepare.sample import sampled
from isobatch.deployments.progress import show
from isobatch.deployments.ray_facts import address_file
from isobatch.deployments.sources import title_of
from isobatch.profiles.devices import Link, kind_of, known_kinds
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, differ, load, save
from isobatch.profiles.latency import USUAL_LARGEST, LatencyTable
from isobatch.profiles.lengths import Lengths
from isobatch.profiles.measure import CountedExits, count_exits, device_name
from isobatch.profiles.model import edges_of

if TYPE_CHECKING:
    from isobatch.cluster.commands.profile import ClassifierProfileOptions

COUNTED = "exits: counted over "  # begins the note on exits of the user's own inputs


def profile_inputs(options: "ClassifierProfileOptions", source: Path) -> None:
    model, data, out = options.model, options.data, options.out
    if data is None:
        check_no_file(options, max_rows=options.max_rows != type(options).max_rows)
    dtype = options.dtype or checkpoint.usual_dtype(source, resolve_device(options.device))
    no_texts = options.tokens and checkpoint.reads_images(source)
    check_unread({"--tokens": no_texts}, "is for networks that read texts: leave it out")
    tokens = numbers_in("--tokens", options.tokens, int, "numbers of tokens, as in 32,128") if options.tokens else []
    kinds = known_kinds(options.devices)
    if options.together:
        check_can_share(str(resolve_device(options.device)))
    compute_with(options.threads)
    console = Console(soft_wrap=True, markup=False)
    before = load(out) if out.exists() else None
    rows, origin = _recorded(console, source, data, options) if data else ([], "")
    recorded = [row.value for row in rows]
    exact = load_served(model, device=options.device, dtype=weights_dtype(dtype))
    weights = weights_of(source)
    if before:
        before.check_same(title_of(model), exact.num_blocks, weights)
    kind = options.kind or kind_of(device_name(str(exact.device)))
    if warning := block_times.uncatalogued(kind):
        console.print(warning, highlight=False)
    ramps = ramps_of(source)
    counted_before = before is not None and _is_counted(before, ramps, out, data, console)
    exits, exit_notes = (None, ()) if counted_before else _prepared_exits(exact)
    network = block_times.on_timed_backend(exact, model, options.backend, dtype)
    with naming_rows(data or source, rows):
        lengths = block_times.lengths_of(network, recorded)
    inputs = block_times.sample_inputs(network, source, lengths, tokens)
    others = [each for each in kinds if each != kind]
    derived = _derived_tables(source, others, options.dtype, [each.length for each in inputs], network.ramp_blocks)
    largest = options.largest or (USUAL_LARGEST if options.together else None)  # sharers need memory, too
    measured = block_times.timed(network, inputs, kind, dtype, options.timing_s, largest)
    own, shared = [each.table for each in measured], list[tuple[LatencyTable, str]]()
    interrupted, by_tokens, ended = len(measured) < len(inputs) or measured[-1].interrupted, None, None
    if options.together and not interrupted:
        backend = network.backend if options.backend == AUTO else options.backend
        same = TimedNetwork(model, source, str(exact.device), dtype, backend, lengths, tokens, options.threads)
        at_once = shared_tables(same, own, options.together, options.timing_s)
        shared, ended = kept(show(at_once, f"timing {options.together} launches at once", len(own)))
        interrupted = isinstance(ended, KeyboardInterrupt)
    if data and not interrupted:
        try:
            with naming_rows(data, rows):
                counted = count_exits(network, block_times.in_batches(network, recorded))
            exit_notes = _notes_on(counted, len(recorded), origin, lengths, data)
            exits, by_tokens, interrupted = counted.exits, counted.by_tokens, counted.interrupted
        except KeyboardInterrupt:  # before any were counted: the times are kept
            interrupted = True
    exits, by_tokens = (each and block_times.with_sure(each, source, exact.ramps.rules) for each in (exits, by_tokens))
    notes = (*(str(each) for each in measured), *(note for _, note in shared), *exit_notes)
    tables = (*own, *(table for table, _ in shared), *derived)
    new = Profile(title_of(model), tables, exits, notes, weights, lengths, by_tokens, edges_of(network), ramps=ramps)
    with locked(out):  # another command may have added a profile meanwhile
        save(load(out).joined_by(new) if out.exists() else new, out)
    _report(console, new, out)
    if isinstance(ended, Exception):
        raise ended
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _is_counted(before: Profile, ramps: str, out: Path, data: Path | None, console: Console) -> bool:
    """Whether the exits were counted over recorded inputs with these ramps. Prints that others are dropped."""
    if not any(note.startswith(COUNTED) for note in before.notes):
        return False
    same = not differ(before.ramps, ramps)
    if not same and data is None:
        console.print(f"the exits in {out} are of other ramps, so they are dropped: --data counts them again")
    return same


def _derived_tables(
    source: Path, kinds: list[str], dtype: str | None, lengths: Sequence[int | None], ramps: Collection[int]
) -> list[LatencyTable]:
    """Tables of devices that are not here; of each kind, first that of the precision which counts if none is named."""
    side = checkpoint.image_size(source)[0] if checkpoint.reads_images(source) else 0
    precisions = {kind: dtype or own_precisions(source, kind)[0] for kind in kinds}
    tables = checkpoint_tables(source, kinds, lengths, side, ramps)
    return sorted(tables, key=lambda each: (kinds.index(each.kind), each.dtype != precisions[each.kind]))


def _notes_on(counted: CountedExits, inputs: int, origin: str, lengths: Lengths | None, data: Path) -> tuple[str, ...]:
    over = f"{COUNTED}{counted.inputs} inputs"
    if counted.interrupted:
        over = f"exits: WARNING: interrupted: counted over {counted.inputs} of {inputs} inputs"
    if not lengths:
        return (f"{over} of {origin}",)
    span = f"{lengths.tokens[0]} to {lengths.tokens[-1]}: plans count tokens"
    return f"{over} of {origin}", f"lengths: {lengths.mean} tokens on average in {name_of(data)}, {span}"


def kept(measured: Iterable[tuple[LatencyTable, str]]) -> tuple[list[tuple[LatencyTable, str]], BaseException | None]:
    """The tables that were measured until Ctrl-C or an error, and this exception; None: there was none."""
    made = list[tuple[LatencyTable, str]]()
    try:
        made.extend(measured)
    except (KeyboardInterrupt, UserError, RuntimeError) as error:
        return made, error
    return made, None


def _report(console: Console, new: Profile, out: Path) -> None:
    console.print(block_times.report(new))
    for device, tables in groupby((each for each in new.tables if each.derived), key=lambda each: each.kind_and_length):
        variants = (f"{each.backend} {each.dtype}, {each.origin}" for each in tables)
        console.print(f"not measured: {device} ({'; '.join(variants)})", highlight=False)
    for note in new.notes:
        console.print(note, highlight=False)
    console.print(f"written to {out}")


def _prepared_exits(network: ServedModel) -> tuple[ExitProfile | None, tuple[str, ...]]:
    """The exits that 'isobatch prepare' measured, used where no data is given, and a note on where they come from."""
    rules = [(rule.block, rule.survival) for rule in network.ramps.rules.ramps]
    if not rules:
        return None, ()
    exits = block_times.exits_from_rules(rules, network.num_blocks)
    if exits:
        return exits, ("exits: as 'isobatch prepare' measured them; --data counts them over your own inputs",)
    return None, ("exits: WARNING: not known, so a plan assumes that no input leaves early; give --data",)


def _recorded(console: Console, source: Path, data: Path, options: "ClassifierProfileOptions") -> tuple[list[Row], str]:
    """A sample of a file's rows, and a name for them. The file is read before anything is timed, so that a wrong file
    is refused at once.

    Rows that ramps were trained on are left out, because ramps are surer of them than of others.
    """
    rows, origin = block_times.untrained(options.rows_for(source, console, data), source, data)
    return sampled(rows, options.max_rows), origin


def profile_links(options: "ClassifierProfileOptions", source: Path) -> None:
    out, console = options.out, Console(soft_wrap=True, markup=False, highlight=False)
    if not out.exists():
        raise UserError(f"--links adds to a profile, and there is no {out}: make it first, without --links")
    known, device = load(out), str(resolve_device(options.device))
    known.check_same(title_of(options.model), known.num_blocks, weights_of(source))
    kind = options.kind or kind_of(device_name(device))
    largest = max(table.largest * max(table.hidden_bytes) for table in known.tables)
    for link, note in _measured(device, kind, {*known.kinds, kind}, sizes_up_to(largest), console):
        console.print(f"{note}: {1e3 * link.latency_s:.2f} ms and {link.bytes_per_s / 1e6:.0f} MB/s")
        with locked(out):  # each is kept at once
            now = load(out)  # others may have added to it meanwhile
            save(now.joined_by(replace(now, links=(link,), notes=(note,))), out)
    console.print(f"written to {out}")
    console.print(
        "the link in one machine counts with --one-machine of isobatch plan and tune, and with one_machine of the "
        "controller; plans that an application makes at its start count links between nodes only"
    )


def _measured(
    device: str, kind: str, kinds: Collection[str], sizes: Sequence[int], console: Console
) -> Iterator[tuple[Link, str]]:
    yield in_one_machine(device, kind, sizes)
    if not address_file().exists():
        console.print("links between nodes are not measured: no Ray runs here")
        return
    with attached("auto"):
        yield from between_nodes(kinds, sizes)
