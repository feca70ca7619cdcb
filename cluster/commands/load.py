"""`isobatch load`: open-loop load on a server, what it answered, and a picture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands import KeyVariable, key_headers
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
from profiles.errors import UserError
from profiles.lengths import read_lengths, text_of

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.load.prompts import PromptLoad
    from deployments.prepare.data import Columns

SLO_MS = 1000.0  # where neither the user nor the server says one
MOST_TEXTS = 20_000
MOST_SAID = 300  # bytes that are shown of a reply other than 200
RATE_OR_CLIENTS = "give either --clients (closed loop), or --rate or --trace or both (open loop)"


@dataclass(frozen=True)
class _Asking:
    """When requests are sent."""

    rate: float | None
    clients: int | None
    arrivals: str
    cv: float
    trace: Path | None
    trace_each_s: float | None
    seconds: float
    seed: int
    console: Console

    def __call__(self, source: Any) -> Any:
        """The load on a source, whatever it sends."""
        from cluster.load import traces, workloads

        if self.clients:
            return source.by_clients(self.clients, self.seconds)
        if self.trace:
            self.console.print(traces.understood(self.trace, self.trace_each_s), highlight=False)
            return source.at(traces.trace(self.trace, self.rate, self.seconds, self.seed, self.trace_each_s))
        if self.rate is None:
            raise UserError(RATE_OR_CLIENTS)
        return source.at(workloads.arrivals(self.arrivals, self.rate, self.seconds, self.seed, self.cv))


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
    trace_each_s: Annotated[
        float | None, typer.Option(help="The seconds that each count of the trace is for, if the file does not say.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long.")] = 30.0,
    slo_ms: Annotated[
        float | None,
        typer.Option(
            help="An answer, or a text's first token, within this is good. None: the server's own, or 1000.",
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[bool, typer.Option(help="Send the SLO as X-Deadline-Ms; not with --prompts.")] = True,
    data: Annotated[
        Path | None, typer.Option(help=f"Inputs, one a request, sent in turn: {READS}. None: made-up ones.")
    ] = None,
    bodies: Annotated[Path | None, typer.Option(help="Instead: a JSON body per line, sent in turn.")] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="Instead: made-up texts of so many tokens, a number per line, sent in turn.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Of a decoder: a prompt per line, each written on from, as a stream.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --prompts: the most tokens of a text. None: as many as the server allows.",
            show_default=False,
        ),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="A sample of at most so many inputs of --data.")] = 10_000,
    text_column: TextColumn = None,
    text_pair_column: PairColumn = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    columns: Header = None,
    delimiter: Delimiter = None,
    encoding: Encoding = "utf-8",
    api_key_variable: KeyVariable = None,
    connections: Annotated[int, typer.Option(min=1, help="At most.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same arrivals.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the figures go; the picture beside it.")] = Path("load.json"),
) -> None:
    """Ask at a given rate, whatever the server does, and count latency from when each request was due.

    Without --data or --bodies, the server is asked what its network takes, and sent made-up sentences, images of noise
    of its size, or the demo's digits. The exit code is 1 if nothing was answered, or anything otherwise than by an
    answer, a refusal (503) or an expired deadline (504).

    With --prompts, a decoder is asked at /v1/completions: times to the first token and between tokens, tokens a second.

    Example: [bold]isobatch load http://127.0.0.1:8000/predict --rate 200[/]
    """
    from rich.console import Console

    from cluster.commands import above_0, check_writable, server_at
    from cluster.load import generator, report
    from cluster.load.bodies import bodies_of, predicts_at, promised_ms
    from cluster.load.connection import looking
    from cluster.load.prompts import PromptLoad, prompts_in

    if clients is not None and (rate is not None or trace is not None):
        raise UserError(RATE_OR_CLIENTS)
    if sum(each is not None for each in (data, bodies, lengths, prompts)) > 1:
        raise UserError("--data, --bodies, --lengths and --prompts are ways to say what is sent: choose one")
    above_0("--slo-ms", slo_ms)
    above_0("--rate", rate)
    url = server_at(url)
    check_writable(out)
    console = Console(soft_wrap=True, markup=False)
    key = key_headers(api_key_variable)
    asking = _Asking(rate, clients, arrivals, cv, trace, trace_each_s, seconds, seed, console)
    if prompts:
        texts = PromptLoad(url, prompts_in(prompts), max_tokens, key)
        return _decode(texts, asking, slo_ms or SLO_MS, out, console)
    url = predicts_at(url)
    slo_ms = slo_ms or promised_ms(url, key) or SLO_MS
    told = key | ({"X-Deadline-Ms": f"{slo_ms:g}"} if deadline else {})
    headers = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    tokens = _tokens(lengths) if lengths else None
    wanted = columns_of(text_column, text_pair_column, image_column, label_column, columns, delimiter, encoding)
    sent = bodies_of(map(text_of, tokens)) if tokens else _bodies(url, key, data, wanted, max_rows, bodies, console)
    source = generator.LoadGenerator(url, sent, max(connections, clients or 0), headers)
    with console.status(f"asking {url} for {seconds:g} s"):
        record = replace(looking(asking(source)), asked_s=seconds)
    found = report.summary(record, slo_ms, tokens)
    report.write(found, out)
    report.draw(record, slo_ms, out.with_suffix(".png"))
    console.print(report.table(found, slo_ms))
    if found.lateness.warning:
        console.print(found.lateness.warning, style="yellow")
    for status, said in sorted(source.said.items()):
        if said:
            console.print(f"status {status} said: {said[:MOST_SAID].decode(errors='replace')}")
    console.print(f"written to {out}; the picture is {out.with_suffix('.png')}")
    if found.failed:
        raise typer.Exit(1)
    return None


def _decode(source: PromptLoad, asking: Callable[[Any], Any], slo_ms: float, out: Path, console: Console) -> None:
    """The same for prompts that are written on from."""
    from cluster.load import prompts

    with console.status("asking"):
        written = asyncio.run(asking(source))
    found = prompts.summed(written, slo_ms)
    prompts.write(found, out)
    console.print(prompts.table(found, slo_ms))
    for said in {each.status: each.said for each in written if each.said}.values():
        console.print(said[:MOST_SAID].decode(errors="replace"))
    console.print(f"written to {out}")
    if found.failed:
        raise typer.Exit(1)


def _tokens(path: Path) -> tuple[int, ...]:
    found = read_lengths(path)
    if len(found) > MOST_TEXTS:
        raise UserError(f"{path} has {len(found)} lines, of which {MOST_TEXTS} are held at most: give a sample of them")
    return found


def _bodies(
    url: str,
    key: dict[str, str],
    data: Path | None,
    columns: Columns,
    max_rows: int,
    bodies: Path | None,
    console: Console,
) -> list[bytes]:
    from cluster.load.bodies import bodies_in, bodies_of, made_up, taken_at

    if bodies:
        return bodies_in(bodies)
    takes = taken_at(url, key)
    texts = takes.texts
    if data is None:
        what, sent = made_up(takes)
        console.print(
            f"{url} takes {'texts' if texts else 'images'}: sending {len(sent)} {what}; --data sends your own",
            highlight=False,
        )
        return sent
    from deployments.prepare.data import rows, taken
    from deployments.prepare.sample import sampled

    console.print(taken(data, columns, channels=takes.channels), highlight=False)
    return bodies_of(sampled((row.value for row in rows(data, columns, channels=takes.channels)), max_rows))
