"""`isobatch load`: open-loop load on a server, what it answered, and a picture."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from profiles.errors import UserError

DEMO_INPUTS = 256
MOST_SAID = 300  # bytes that are shown of a reply other than 200
RATE_OR_CLIENTS = "give either --clients (closed loop), or --rate or --trace or both (open loop)"


def load(
    url: Annotated[str, typer.Argument(help="Where to ask, such as http://127.0.0.1:8000/predict.")],
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, on average. Not needed with --trace: its own then.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Closed loop instead: each asks again once answered.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma, uniform, step or daynight.")] = "poisson",
    cv: Annotated[float, typer.Option(help="Variation of the gaps between arrivals (gamma).")] = 3.0,
    trace: Annotated[Path | None, typer.Option(help="A recorded trace to follow, scaled to --rate.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long.")] = 30.0,
    slo_ms: Annotated[float, typer.Option(help="An answer within this time is a good one.")] = 1000.0,
    deadline: Annotated[bool, typer.Option(help="Send the SLO as X-Deadline-Ms.")] = True,
    bodies: Annotated[
        Path | None, typer.Option(help="A JSON body per line, sent in turn; none: the demo's digits.")
    ] = None,
    connections: Annotated[int, typer.Option(min=1, help="At most.")] = 512,
    seed: Annotated[int, typer.Option(help="The same seed, the same arrivals.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the figures go; the picture beside it.")] = Path("load.json"),
) -> None:
    """Ask at a given rate, whatever the server does, and count latency from when each request was due.

    Example: [bold]isobatch load http://127.0.0.1:8000/predict --rate 200[/]
    """
    from rich.console import Console

    from cluster.commands import check_writable
    from cluster.load import generator, report, traces, workloads

    if clients is not None and (rate is not None or trace is not None):
        raise UserError(RATE_OR_CLIENTS)
    check_writable(out)
    headers = f"X-Deadline-Ms: {slo_ms:g}\r\n" if deadline else ""
    source = generator.LoadGenerator(url, _bodies(bodies), max(connections, clients or 0), headers)
    console = Console(soft_wrap=True)
    if clients:
        asking = source.by_clients(clients, seconds)
    elif trace:
        asking = source.at(traces.trace(trace, rate, seconds, seed))
    elif rate is not None:
        asking = source.at(workloads.arrivals(arrivals, rate, seconds, seed, cv))
    else:
        raise UserError(RATE_OR_CLIENTS)
    with console.status(f"asking {url} for {seconds:g} s"):
        record = asyncio.run(asking)
    found = report.summary(record, slo_ms)
    report.write(found, out)
    report.draw(record, slo_ms, out.with_suffix(".png"))
    console.print(report.table(found, slo_ms))
    if found.lateness.warning:
        console.print(found.lateness.warning, style="yellow")
    for status, said in sorted(source.said.items()):
        if said:
            console.print(f"status {status} said: {said[:MOST_SAID].decode(errors='replace')}", markup=False)
    console.print(f"written to {out}; the picture is {out.with_suffix('.png')}")


def _bodies(path: Path | None) -> list[bytes]:
    if path is None:
        from deployments.demo.digits import demo_inputs

        return [json.dumps({"inputs": [digit.round(1).tolist()]}).encode() for digit in demo_inputs(DEMO_INPUTS)]
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not lines:
        raise UserError(f"{path} is empty: it needs a JSON body per line")
    return lines
