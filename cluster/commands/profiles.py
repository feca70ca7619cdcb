"""`isobatch profiles`: shows published times of devices, and the curves fitted to them."""

from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isobatch.profiles.curves import curve_table, fitted, published
from isobatch.profiles.datasheet import ENCODERS, published_shape
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable
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


def _checked(network: str) -> str:
    names = [*ENCODERS, "resnet50", "resnet18"]
    if network not in names:
        raise UserError(f"unknown network {network!r}: choose among {', '.join(names)}")
    return network


def _rates(tables: list[LatencyTable], title: str) -> Table:
    rows = _table(title, ("device", "backend", "dtype", "from"), [*map(str, SIZES), "knee"])
    for table in tables:
        names = (table.kind, table.backend or "", table.dtype or "", table.origin)
        rows.add_row(*names, *_ms(table), str(knee(table)))
        for end, words in enumerate(("at least", "at most") if table.interval else ()):
            rows.add_row("", "", "", words, *_ms(table.at_end_of_interval(end)))
    return rows


def _ms(table: LatencyTable) -> list[str]:
    return [figure(seconds * 1e3) for seconds in whole_s(table)]


def _table(title: str, names: "Sequence[str]", figures: "Sequence[str]") -> Table:
    """An empty table without padding, so that many columns fit into 80 characters."""
    table = Table(*names, title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def figure(value: float) -> str:
    """
    >>> figure(0.12345), figure(12.345), figure(1234.5)
    ('0.123', '12.3', '1,234')
    """
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
