"""`isobatch profile --links`: what moving survivors costs, added to a profile that has the times of this device."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from isobatch.cluster.profiling.links import between_nodes, in_one_machine, sizes_up_to
from isobatch.cluster.serving.local import attached
from isobatch.deployments.folders import locked, weights_of
from isobatch.deployments.models.loading import resolve_device
from isobatch.deployments.ray_facts import address_file
from isobatch.deployments.sources import title_of
from isobatch.profiles.devices import Link, kind_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import load, save
from isobatch.profiles.measure import device_name

if TYPE_CHECKING:
    from isobatch.cluster.commands.profile import ClassifierProfileOptions


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
