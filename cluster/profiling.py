"""Profile a checkpoint on this machine: what to feed it, what to call the device, and how to tell the result."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from profiles.devices import CATALOGUE
from profiles.files import Profile
from profiles.measure import Measured, Sweep, facts_of, stopwatch_for
from profiles.model import Batch, SplitModel
from profiles.picture import name
from profiles.sweep import whole_s

WORD = "the"  # one token to every tokenizer of English
COUNTED_AT_ONCE = 32


@dataclass(frozen=True)
class Inputs:
    """Batches of one length to measure with."""

    length: int | None
    batch: Callable[[int], Batch]


def texts(model: SplitModel, lengths: Sequence[int]) -> Iterator[Inputs]:
    """Invented texts of these lengths in tokens, as far as the network takes them."""
    frame = _length(model.encode([WORD])) - 1  # tokens that surround every text
    words = {length: " ".join([WORD] * max(length - frame, 1)) for length in lengths}
    found = {_length(model.encode([text])): text for text in words.values()}
    for length, text in sorted(found.items()):
        yield Inputs(length, partial(_repeated, model, text))


def images(model: SplitModel, side: int, channels: int) -> Inputs:
    """Blank images: no device computes faster for that."""
    return Inputs(None, partial(_repeated, model, np.zeros((side, side, channels), np.float32)))


def _repeated(model: SplitModel, value: Any, size: int) -> Batch:
    return model.encode([value] * size)


def _length(batch: Batch) -> int:
    assert batch.lengths is not None, "This is a bug: texts have lengths."
    return int(batch.lengths[0])


def in_batches(model: SplitModel, values: Sequence[Any]) -> Iterator[Batch]:
    """What was recorded, encoded a few inputs at a time."""
    with _bar("counting exits", total=1.0) as advance:
        for start in range(0, len(values), COUNTED_AT_ONCE):
            advance(start / len(values), f"of {len(values)} inputs")
            yield model.encode(values[start : start + COUNTED_AT_ONCE])


def timed(
    model: SplitModel, inputs: Sequence[Inputs], kind: str, source: str, device: str, budget_s: float, largest: int
) -> list[Measured]:
    """One table per length, each with its share of the budget; after a Ctrl-C no other is begun."""
    found: list[Measured] = []
    stopwatch = stopwatch_for(device)
    with _bar("timing", total=1.0) as advance:
        for index, each in enumerate(inputs):
            facts = facts_of(model, each.batch(1), kind, each.length, source, device)
            sweep = Sweep(
                model,
                each.batch,
                stopwatch,
                budget_s=budget_s / len(inputs),
                largest=largest,
                progress=partial(_advance, advance, index, len(inputs)),
            )
            found.append(sweep.run(facts))
            if found[-1].interrupted:
                break
    return found


def _advance(bar: Callable[[float, str], None], index: int, count: int, share: float, what: str) -> None:
    bar((index + share) / count, what)


@contextmanager
def _bar(what: str, total: float) -> Iterator[Callable[[float, str], None]]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda share, detail: progress.update(task, completed=share * total, description=f"{what} {detail}")


def kind_of(device_name: str) -> str:
    """The catalogue's name for a device that calls itself so, or a name made from its own.

    >>> kind_of("NVIDIA A100-SXM4-80GB"), kind_of("NVIDIA L40S"), kind_of("NVIDIA RTX A6000"), kind_of("Radeon VII")
    ('a100', 'l40s', 'a6000', 'radeon-vii')
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    return next((word for word in words if word in CATALOGUE), "-".join(word for word in words if word != "nvidia"))


def source_of(device_name: str, dtype: str, threads: int, now: datetime | None = None) -> str:
    """Where a table's numbers come from.

    >>> source_of("cpu", "float32", 2, datetime(2026, 1, 31))
    'measured: cpu, float32, 2 host threads, 2026-01-31'
    """
    count = f"{threads} host thread{'s' if threads > 1 else ''}"
    return f"measured: {device_name}, {dtype}, {count}, {(now or datetime.now(UTC)).date().isoformat()}"


def report(profile: Profile) -> Table:
    """A row per batch size that was measured."""
    rows = Table(
        title=f"{profile.model}: {profile.num_blocks} blocks, ramps off (what they would add stands last)",
        title_justify="left",
    )
    for heading in ("device", "batch", "ms", "p95 ms", "ms per input", "inputs/s", "ramps ms"):
        rows.add_column(heading, justify="left" if heading == "device" else "right")
    for table in profile.tables:
        p95_s = table.launch_s + table.block_p95_times_s(table.batch_sizes).sum(axis=-1)
        ramps_s = table.ramp_times_s(table.batch_sizes).sum(axis=-1)
        for size, seconds, slow_s, ramp_s in zip(table.batch_sizes, whole_s(table), p95_s, ramps_s, strict=True):
            cells = (f"{1000 * value:.3g}" for value in (seconds, slow_s, seconds / size))
            rows.add_row(name(table), str(size), *cells, f"{size / seconds:,.0f}", f"{1000 * ramp_s:.3g}")
        rows.add_section()
    return rows


def picture_path(out: Path) -> Path:
    """
    >>> str(picture_path(Path("runs/profile.json")))
    'runs/profile.png'
    """
    return out.with_suffix(".png")
