"""`isobatch profiles`: shows published times of devices, and the curves fitted to them."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isobatch.profiles.curves import Published, curve_table, fitted, published
from isobatch.profiles.datasheet import ENCODERS, published_shape
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import load
from isobatch.profiles.latency import LatencyTable, mixed_backends_warning
from isobatch.profiles.picture import PALETTE, plain, plain_logarithmic
from isobatch.profiles.sweep import knee, whole_s

if TYPE_CHECKING:
    from collections.abc import Sequence


profiles = typer.Typer(
    no_args_is_help=True,
    help="Published times of devices, and curves fitted to them.\n\n"
    "Example: [bold]isobatch profiles show v100,l4 --backend onnx[/]",
)
SIZES = (1, 2, 4, 8, 16, 32, 64)  # as many as fit into a table of 80 columns

Kinds = Annotated[str, typer.Argument(help="Kinds of devices: v100,a100,l4.")]
Network = Annotated[
    str, typer.Option(help="bert-base, bert-large, bert-6l-768h, bert-4l-288h, vit-b, vit-l, resnet50.")
]
Length = Annotated[int, typer.Option(min=1, help="Tokens of an input (images have one size).")]
Backends = Annotated[str, typer.Option(help="torch, graphs, onnx, tensorrt; several: onnx,torch.")]
Dtype = Annotated[str, typer.Option(help="float16 or float32.")]
Picture = Annotated[Path | None, typer.Option(help="Draw a picture into this file.")]


@profiles.command("list")
def list_all() -> None:
    """List every curve with its device and framework, its constants, and the number and error of its fitted times.

    Example: [bold]isobatch profiles list[/]
    """
    title = "curves fitted to published times: a launch = call + layers, each at least its kernels' floors"
    names, figures = ("device", "backend", "dtype", "family"), ("call\nus", "floor\nus", "GB\n/s", "Tflop\n/s")
    table = _table(title, names, (*figures, "times", "error"))
    table.add_column("networks")
    for fit in fitted():
        curve = fit.curve
        constants = (curve.call_s * 1e6, curve.floor_s * 1e6, curve.bytes_per_s / 1e9, curve.flops_per_s / 1e12)
        cells = [f"{value:.3g}" for value in constants]
        cells += [str(fit.rows), f"{fit.error:.0%}", fit.networks]
        table.add_row(fit.kind, fit.backend, fit.dtype, fit.family, *cells)
    Console().print(table)


@profiles.command()
def show(
    kinds: Kinds,
    network: Network = "bert-base",
    length: Length = 128,
    backend: Backends = "onnx",
    dtype: Dtype = "float16",
    picture: Picture = None,
) -> None:
    """Show how long batches take on devices, with the published times and their sources.

    Example: [bold]isobatch profiles show v100,l4 --backend onnx --network bert-base --length 128[/]
    """
    shape = published_shape(_checked(network), length)
    tables = [
        curve_table(shape, kind.strip(), backend=each.strip(), dtype=dtype, batch_sizes=SIZES)
        for kind, each in product(kinds.split(","), backend.split(","))
    ]
    shown = {(table.kind, table.backend, table.dtype, network, table.length) for table in tables}
    facts = [each for each in published() if (each.kind, each.backend, each.dtype, each.network, each.length) in shown]
    console = Console(soft_wrap=True)
    console.print(_rates(tables, f"{network}: ms per batch"))
    for fact in facts:
        times = ", ".join(f"{batch}: {seconds * 1e3:g}" for batch, seconds in fact.seconds)
        console.print(f"{fact.kind}, {fact.framework}, ms by batch: {times}  ({fact.source})", highlight=False)
    _draw(console, tables, facts, f"{network}, {dtype}", picture)


@profiles.command()
def compare(
    profile: Annotated[Path, typer.Argument(help="A file of 'isobatch profile' with measured tables.")],
    network: Network = "bert-base",
    backend: Backends = "",
    dtype: Dtype = "",
    picture: Picture = None,
) -> None:
    """Compare the measured times in a profile with the curves' times for the same network on the same device.

    Example: [bold]isobatch profiles compare profile.json --network bert-base --picture compare.png[/]
    """
    measured = [table for table in load(profile).on(backend, dtype).tables if not table.derived and table.kind != "cpu"]
    if not measured:
        raise UserError(f"{profile} contains no table that was measured on a GPU: there is nothing to compare")
    console, pairs = Console(soft_wrap=True), list[LatencyTable]()
    for table in measured:
        shape = published_shape(_checked(network), table.length)
        if len(shape.blocks) != table.num_blocks:
            blocks = f"{table.num_blocks} blocks, {network} has {len(shape.blocks)}"
            raise UserError(f"{profile} has {blocks}: name the network")
        precise = {"backend": table.backend or "torch", "dtype": table.dtype or "float32"}
        pairs += [table, curve_table(shape, table.kind, **precise, batch_sizes=table.batch_sizes)]
    console.print(_rates(pairs, f"{network}: ms per batch"))
    if warning := mixed_backends_warning(measured):
        console.print(f"[bold yellow]mixed:[/] {warning}")
    _draw(console, pairs, [], network, picture)


def _checked(network: str) -> str:
    names = [*ENCODERS, "resnet50", "resnet18"]
    if network not in names:
        raise UserError(f"unknown network {network!r}: choose among {', '.join(names)}")
    return network


def _rates(tables: list[LatencyTable], title: str) -> Table:
    all_sizes = sorted({size for table in tables for size in table.batch_sizes})
    sizes = spread(all_sizes, len(SIZES))
    note = f", {len(sizes)} of {len(all_sizes)} batch sizes" if len(sizes) < len(all_sizes) else ""
    headings = {size: table.size_text(size) for table in tables for size in table.batch_sizes}
    rows = _table(title + note, ("device", "backend", "dtype", "from"), [*(headings[size] for size in sizes), "knee"])
    for table in tables:
        names = (table.kind, table.backend or "", table.dtype or "", table.origin)
        rows.add_row(*names, *_ms(table, sizes), str(knee(table)))
        for end, words in enumerate(("at least", "at most") if table.interval else ()):
            rows.add_row("", "", "", words, *_ms(table.at_end_of_interval(end), sizes))
    return rows


def _ms(table: LatencyTable, sizes: "Sequence[float]") -> list[str]:
    ms = {size: figure(seconds * 1e3) for size, seconds in zip(table.batch_sizes, whole_s(table), strict=True)}
    return [ms.get(size, "") for size in sizes]


def _table(title: str, names: "Sequence[str]", figures: "Sequence[str]") -> Table:
    """An empty table without padding, so that many columns fit into 80 characters."""
    table = Table(*names, title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def spread(sizes: "Sequence[float]", most: int) -> list[float]:
    """At most `most` of the sizes, evenly chosen, with the first and the last.

    >>> spread([1, 2, 4, 8, 16, 32], 3), spread([1, 2], 3)
    ([1, 4, 32], [1, 2])
    """
    last = len(sizes) - 1
    return [sizes[round(place * last / (most - 1))] for place in range(most)] if last >= most else list(sizes)


def figure(value: float) -> str:
    """
    >>> figure(0.12345), figure(12.345), figure(1234.5)
    ('0.123', '12.3', '1,234')
    """
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _draw(console: Console, tables: list[LatencyTable], facts: list[Published], title: str, path: Path | None) -> None:
    """Draw measured and published times as points and curves as dashed lines, with a colour for device and backend."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    plain(axes)
    colours: dict[tuple[str, str | None], str] = {}
    for table in tables:
        name = (table.kind, table.backend)
        colour = colours.setdefault(name, PALETTE[len(colours) % len(PALETTE)])
        label = " ".join(filter(None, (*name, table.dtype)))
        line = "--" if table.derived else "o-"
        axes.plot(table.batch_sizes, whole_s(table) * 1e3, line, color=colour, label=f"{label}: {table.origin}")
        for fact in facts:
            if (fact.kind, fact.backend) == name:
                points = [(batch, seconds * 1e3) for batch, seconds in fact.seconds if batch <= table.batch_sizes[-1]]
                axes.plot(*zip(*points, strict=True), "o", color=colour)
    axes.set(xlabel="batch size", ylabel="ms per batch", yscale="log", title=title)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    plain_logarithmic(axes.yaxis)
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    console.print(f"drawn in {path}", markup=False)
