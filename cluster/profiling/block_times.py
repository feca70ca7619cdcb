"""Profiles a checkpoint on this machine: makes inputs for it, names the device, and reports the result."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from isobatch.deployments.models import checkpoint
from isobatch.deployments.models.backends import make_ready, on_backend
from isobatch.deployments.models.ramps import ExitRules, made_from
from isobatch.deployments.models.served_model import BlockRange, ServedModel
from isobatch.deployments.named import INT8
from isobatch.deployments.prepare.data import Row, name_of
from isobatch.deployments.prepare.sample import not_trained_on
from isobatch.deployments.progress import bar, show
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.holdings import Share
from isobatch.deployments.transport.orders import Order
from isobatch.profiles.devices import CATALOGUE
from isobatch.profiles.errors import UserError
from isobatch.profiles.evidence import EVIDENCE, Evidence
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.lengths import WORD, Lengths
from isobatch.profiles.measure import Measured, Sweep, device_name, facts_of, host_clock_for, stopwatch_for
from isobatch.profiles.model import Batch, SplitModel
from isobatch.profiles.promise import RULES
from isobatch.profiles.sweep import whole_s

USUAL_TOKENS = (32, 128)  # of texts, if neither recorded ones nor --tokens say how long they are
COUNTED_AT_ONCE = 32  # recorded inputs that are encoded at a time
JOINED = 4  # parts of each launch in a replica that is timed
TIMES = 25  # launches in a replica that are timed
HELD_S = 3600.0  # for which a replica holds inputs: longer than timing takes
SHORT = 0.25  # of the mean length: the shortest text that is timed alone, if texts differ in length


@dataclass(frozen=True)
class SampleInputs:
    """Batches for timing. `length` is the inputs' length, or the mean if they differ; None for images.

    A batch of less than one input is one shorter text; `least` is the smallest size.
    """

    length: int | None
    batch: Callable[[float], Batch]
    least: float = 1


def texts(model: SplitModel, lengths: Sequence[int]) -> Iterator[SampleInputs]:
    """Made-up texts of these lengths in tokens, at most as long as the network allows."""
    by_length = {_length(text): text for text in (_text(model, length) for length in lengths)}
    for length, text in sorted(by_length.items()):
        yield SampleInputs(length, partial(_repeated, model, text))


def texts_like(model: SplitModel, lengths: Lengths) -> SampleInputs:
    """Made-up texts whose lengths have this distribution."""
    text = cache(partial(_text, model))

    def batch(size: float) -> Batch:
        wanted = lengths.spread(round(size)).tolist() if size > 1 else [max(1, round(size * lengths.mean))]
        return model.merge([text(length) for length in wanted])

    return SampleInputs(lengths.mean, batch, least=SHORT)


def _text(model: SplitModel, length: int) -> Batch:
    """One text, doubled until it has this length or the network truncates it, so that no text is longer than needed."""
    words, text = 1, model.encode([WORD])
    frame = _length(text) - 1  # special tokens around every text
    while words + frame < length and _length(text) == words + frame:
        words = min(2 * words, length - frame)
        text = model.encode([" ".join([WORD] * words)])
    return text


def _repeated(model: SplitModel, single: Batch, size: float) -> Batch:
    return model.select(single, np.zeros(round(size), np.int64))


def _length(batch: Batch) -> int:
    assert batch.lengths is not None, "This is a bug: texts have lengths."
    return int(batch.lengths[0])


def sample_inputs(
    model: ServedModel, folder: Path, lengths: Lengths | None, tokens: Sequence[int] = ()
) -> list[SampleInputs]:
    """Images; or texts of each of these numbers of tokens, or if none are given, as long as the recorded ones."""
    if checkpoint.reads_images(folder):
        return [SampleInputs(None, partial(_repeated, model, checkpoint.example(model, folder)))]
    return [texts_like(model, lengths)] if lengths and not tokens else list(texts(model, tokens or USUAL_TOKENS))


def lengths_of(model: ServedModel, recorded: Sequence[Any]) -> Lengths | None:
    """The lengths of recorded texts; None if none are recorded, or the network reads images."""
    lengths = model.encode(recorded).lengths if recorded and model.reads_text else None
    return None if lengths is None else Lengths.of(lengths.tolist())


def in_batches(model: SplitModel, values: Sequence[Any]) -> Iterator[Batch]:
    """The recorded inputs, encoded a few at a time."""
    for start in show(range(0, len(values), COUNTED_AT_ONCE), "counting exits"):
        yield model.encode(values[start : start + COUNTED_AT_ONCE])


def timed(
    model: ServedModel, inputs: Sequence[SampleInputs], kind: str, dtype: str, budget_s: float, largest: int | None
) -> list[Measured]:
    """Measure one table per length, each with an equal share of the budget. A Ctrl-C ends it with the tables so far, if
    there are any: no further one is begun.

    Launches include the replica's own work: it merges inputs and separates exits.
    """
    measured, device = list[Measured](), str(model.device)
    source = source_of(device_name(device), model.backend, dtype, torch.get_num_threads())
    stopwatch = stopwatch_for(device)
    with bar("timing", len(inputs)) as advance:
        for index, each in enumerate(inputs):
            try:
                facts = facts_of(model.exact, each.batch(1), kind, each.length, source, device, model)
                facts = replace(facts, backend=model.backend, dtype=dtype)
                sweep = Sweep(
                    model, each.batch, stopwatch, budget_s=budget_s / len(inputs), largest=largest, least=each.least,
                    progress=partial(advance, index),
                )  # fmt: skip
                own = sweep.run(facts)
            except KeyboardInterrupt:
                if not measured:
                    raise
                break
            measured.append(_with_replica(own, model, each, host_clock_for(device)))
            if measured[-1].interrupted:
                break
    return measured


def timed_whole(
    model: ServedModel, inputs: SampleInputs, kind: str, dtype: str, budget_s: float, largest: int | None
) -> Measured:
    """The table of one length, for commands to which a part of it is of no use: a Ctrl-C ends them."""
    (measured,) = timed(model, [inputs], kind, dtype, budget_s, largest)
    if measured.interrupted:
        raise KeyboardInterrupt
    return measured


def _with_replica(own: Measured, model: SplitModel, inputs: SampleInputs, clock: Callable[[], float]) -> Measured:
    """The same with what a replica adds to each launch, unless a Ctrl-C comes before that is known."""
    try:
        added_s = replica_adds_s(model, inputs.batch(own.table.largest), clock)
    except KeyboardInterrupt:
        return replace(own, interrupted=True, of_replica=False)
    p95_s = None if own.table.launch_p95_s is None else own.table.launch_p95_s + added_s
    return replace(own, table=replace(own.table, launch_s=own.table.launch_s + added_s, launch_p95_s=p95_s))


def replica_adds_s(model: SplitModel, batch: Batch, clock: Callable[[], float]) -> float:
    """Seconds that a replica adds to a launch of the last block for which it joins several parts."""
    replica, last = SplitReplica(model), model.num_blocks - 1
    inside = model.run(batch, last, ()).survivors if last else batch
    assert inside is not None, "This is a bug: no input leaves before the last block."
    parts = np.array_split(np.arange(len(inside)), min(JOINED, len(inside)))
    held = [replica.holdings.hold(model.select(inside, rows), HELD_S) for rows in parts]
    order = Order(model.num_blocks, frozenset(), tuple(Share(each, np.arange(len(each))) for each in held))

    def served() -> None:
        for _ in replica.run(order):
            pass

    added = [
        _took_s(served, clock) - _took_s(lambda: model.run(inside, model.num_blocks, ()), clock) for _ in range(TIMES)
    ]
    return max(0.0, float(f"{np.median(added):.4g}"))


def _took_s(call: Callable[[], object], clock: Callable[[], float]) -> float:
    begun_s = clock()
    call()
    return clock() - begun_s


def uncatalogued(kind: str) -> str | None:
    """What plans need for a kind that is not in the catalogue; None for others."""
    return None if kind in CATALOGUE else f"{kind} is not in the catalogue: plans take it as {kind}=COUNT@PRICE:GB"


def exits_from_rules(ramps: Sequence[tuple[int, float | None]], num_blocks: int) -> ExitProfile | None:
    """The exit profile that 'isobatch prepare' measured: `ramps` are (block, share of inputs that continue after it).

    >>> exits_from_rules([(0, 0.5), (2, 0.1)], num_blocks=4).survival
    (1.0, 0.5, 0.5, 0.1)
    """
    survival = [1.0]
    continuing = dict(ramps)
    for block in range(num_blocks - 1):
        share = continuing.get(block, survival[-1])
        if share is None:
            return None
        survival.append(share)
    try:
        return ExitProfile(tuple(survival))
    except ValueError as error:
        raise UserError(f"exits.json of this checkpoint: {error}") from None


def with_sure(exits: ExitProfile, folder: Path, rules: ExitRules) -> ExitProfile:
    """The exit profile with `sure` of the exit table beside the checkpoint, unless it has its own, or there is none."""
    path = folder / EVIDENCE
    if exits.sure or not path.is_file():
        return exits
    evidence = Evidence.read(path)
    if evidence.shape.num_ramps != exits.num_blocks - 1:
        return exits
    chosen = evidence.nearest({rule.block: rule.threshold for rule in rules.ramps})
    return replace(exits, sure=evidence.exits(chosen).sure)


def on_timed_backend(exact: ServedModel, model: str, backend: str, dtype: str) -> ServedModel:
    network = on_backend(exact, model, backend, int8=dtype == INT8)
    make_ready(network, model, timed_block_ranges(network))
    return network


def timed_block_ranges(model: SplitModel) -> list[BlockRange]:
    """The block ranges that are timed: each block without and with its ramp, and all blocks together."""
    return [
        *(BlockRange(block, block + 1) for block in range(model.num_blocks)),
        *(BlockRange(ramp, ramp + 1, (ramp,)) for ramp in model.ramp_blocks),
        BlockRange(0, model.num_blocks),
    ]


def source_of(device_name: str, backend: str, dtype: str, threads: int) -> str:
    """A sentence on the origin of a table's numbers.

    >>> source_of("cpu", "torch", "float32", 2).rpartition(", ")[0]
    'measured: cpu, torch, float32, 2 host threads'
    """
    count = f"{threads} host thread{'s' if threads > 1 else ''}"
    return f"measured: {device_name}, {backend}, {dtype}, {count}, {datetime.now(UTC).date().isoformat()}"


def report(profile: Profile) -> Table:
    """A table with one row per measured batch size. A text shorter than the mean has no figures per input."""
    rows = Table(
        title=f"{profile.model}: {profile.num_blocks} blocks without ramps (the last column: what ramps add)",
        title_justify="left",
    )
    for heading in ("device", "batch", "ms", "p95 ms", "ms per input", "inputs/s", "ramps ms"):
        rows.add_column(heading, justify="left" if heading == "device" else "right")
    for table in (each for each in profile.tables if not each.derived):
        p95_s = table.launch_s + table.block_p95_times_s(table.batch_sizes).sum(axis=-1)
        ramps_s = table.ramp_times_s(table.batch_sizes).sum(axis=-1)
        for size, seconds, slow_s, ramp_s in zip(table.batch_sizes, whole_s(table), p95_s, ramps_s, strict=True):
            of_inputs = (f"{1000 * seconds / size:.3g}", f"{size / seconds:,.0f}") if size >= 1 else ("", "")
            took = (f"{1000 * seconds:.3g}", f"{1000 * slow_s:.3g}")
            rows.add_row(table.kind_and_length, table.size_text(size), *took, *of_inputs, f"{1000 * ramp_s:.3g}")
        rows.add_section()
    return rows


def untrained(rows: Iterable[Row], folder: Path, data: Path) -> tuple[Iterable[Row], str]:
    """The rows of `data` without those on which the ramps of this checkpoint were trained, and a name for them.

    Ramps are surer of their own rows than of others.
    """
    notes, origin = made_from(folder, data), name_of(data)
    if not notes:
        return rows, origin
    if not all(isinstance(notes.get(name), int) for name in ("rows", "seed")):
        raise UserError(f"{folder / RULES}: notes: rows and seed must be whole numbers, as prepare wrote them")
    return not_trained_on(rows, notes), f"{origin} that ramps were not trained on"
