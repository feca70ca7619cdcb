"""`isobatch load`: sends load to a server, and writes a report of its answers and a picture."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from isobatch.cluster.commands import INTERRUPTED, KeyVariable, above_0, check_writable, key_headers, server_at
from isobatch.cluster.commands.shared_options import (
    READS,
    ArrivalOptions,
    ReadingOptions,
    check_no_file,
    check_not_given,
    check_unread,
    with_options,
)
from isobatch.cluster.load import prompts, report
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord, run_noting_polls
from isobatch.cluster.load.prompts import PATH, PromptLoad, prompts_in
from isobatch.cluster.load.request_bodies import accepted_at, bodies_in, bodies_of, made_up, predicts_at, promised_ms
from isobatch.deployments.prepare.sample import sampled
from isobatch.profiles.errors import UserError, naming_target
from isobatch.profiles.lengths import read_lengths, text_of

DEFAULT_SLO_MS = 1000.0  # if neither the user nor the server names one
CONNECTIONS = 512  # at most, unless there are more clients
ARRIVALS = ("trace_each_s", "arrivals", "cv", "seed")  # options for when inputs arrive, which --clients do not read
MAX_ROWS = 10_000  # the default of --max-rows
MOST_TEXTS = 20_000  # made-up texts, which are all held in memory
SHOWN_BYTES = 300  # of an answer with another status than 200


class _InterruptibleLoad(LoadGenerator):
    """Keeps the measurements before Ctrl-C."""

    interrupted = False

    def record(self, work: Coroutine[Any, Any, LoadRecord], slo_ms: float) -> LoadRecord:
        """The record of a load; after Ctrl-C, of the requests that were sent before it."""
        self.patience_s = max(self.patience_s, slo_ms / 1e3)
        try:
            return run_noting_polls(work)
        except KeyboardInterrupt:
            if np.isnan(self._rows["ended_s"]).all():
                raise
            self.interrupted, self._sent = True, int(np.isfinite(self._rows["reached_s"]).sum())
            return replace(self.so_far(), duration_s=self.now_s())


class _InterruptiblePromptLoad(_InterruptibleLoad, PromptLoad):
    """The same for prompts."""


@with_options(reading=ReadingOptions, arriving=ArrivalOptions)
def load(
    reading: ReadingOptions,
    arriving: ArrivalOptions,
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000/predict.")],
    clients: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: clients that send a request once the last is answered.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="The duration of the load.")] = 30.0,
    slo_ms: Annotated[
        float | None,
        typer.Option(
            help="Answers, or first tokens of texts, within this time are good. None: the server's SLO, or 1000.",
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[bool, "Send the SLO as X-Deadline-Ms; not with --prompts."] = True,
    data: Annotated[Path | None, f"Inputs, sent in turn, one in each request: {READS}. None: made-up ones."] = None,
    bodies: Annotated[Path | None, "Instead: JSON bodies, one in each line, sent in turn."] = None,
    lengths: Annotated[
        Path | None, "Instead: made-up texts with these numbers of tokens, one in each line, sent in turn."
    ] = None,
    prompts: Annotated[Path | None, "For decoders: prompts, one a line, sent in turn; answers are streamed."] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --prompts: the most tokens of a text. None: as many as the server allows.",
            show_default=False,
        ),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="The most inputs of --data; more are sampled.")] = MAX_ROWS,
    api_key_variable: KeyVariable = None,
    out: Annotated[Path, "File for the figures; a picture is written beside it."] = Path("load.json"),
) -> None:
    """Send requests at a given rate, however fast the server is, and count latency from when each request was due.

    Without --data or --bodies, made-up inputs of the kind that the server accepts are sent: sentences, images of noise,
    or the demo's digits. The exit code is 1 if nothing was answered, or if a request ended in another way than with an
    answer, a refusal (503, 429) or an expired deadline (504).

    With --prompts, requests go to /v1/completions. The report has the times to the first token and between tokens, and
    tokens per second.

    Example: [bold]isobatch load http://127.0.0.1:8000/predict --rate 200[/]
    """
    if arriving.given == (clients is not None):
        raise UserError("give either --clients (closed loop), or --rate or --trace or both (open loop)")
    if sum(source is not None for source in (data, bodies, lengths, prompts)) > 1:
        raise UserError("--data, --bodies, --lengths and --prompts all choose what is sent: give only one of them")
    if clients:
        check_not_given(arriving, ARRIVALS, "is for --rate and --trace, not for --clients")
    arriving.check_read()
    if data is None:
        check_no_file(reading, max_rows=max_rows != MAX_ROWS)
    check_unread({"--max-tokens": max_tokens and not prompts}, "is for --prompts: name their file")
    above_0("--slo-ms", slo_ms)
    above_0("--rate", arriving.rate)
    url = server_at(url)
    if out.suffix == ".png":
        raise UserError(f"--out {out} is for the figures, as JSON: the picture has the same name with .png")
    used = data, bodies, lengths, prompts, arriving.trace
    check_writable(out, *used)
    check_writable(out.with_suffix(".png"), *used)
    console = Console(soft_wrap=True, markup=False)
    key = key_headers(api_key_variable)
    run = partial(_run, arriving, clients, seconds, console)
    if prompts:
        server, headers = url.removesuffix(PATH), _header_lines(key)
        prompting = _InterruptiblePromptLoad(server, prompts_in(prompts), max_tokens, headers)
        return _load_prompts(prompting, run, slo_ms or DEFAULT_SLO_MS, out, console)
    url = predicts_at(url, key)
    slo_ms = slo_ms or promised_ms(url, key) or DEFAULT_SLO_MS
    headers = _header_lines(key | ({"X-Deadline-Ms": f"{slo_ms:.12g}"} if deadline else {}))
    tokens: Sequence[int] | None = _tokens(lengths) if lengths else None
    if tokens:
        contents = bodies_of(map(text_of, tokens))
    else:
        contents = _bodies(url, key, data, reading, max_rows, bodies, console)
    source = _InterruptibleLoad(url, contents, max(CONNECTIONS, clients or 0), headers)
    with console.status(f"sending requests to {url} for {seconds:g} s"):
        record = source.record(run(source), slo_ms)
    whole = replace(record, duration_s=seconds)
    record, tokens = _ended_requests(record, tokens) if source.interrupted else (whole, tokens)
    summary = report.summary(record, slo_ms, tokens)
    with naming_target(picture := out.with_suffix(".png"), picture):
        report.draw(record, slo_ms, picture)
    console.print(report.table(summary, slo_ms))
    if summary.lateness.warning:
        console.print(summary.lateness.warning, style="yellow")
    return _finish(summary, source, out, f"written to {out}; the picture is {picture}", console)


def _header_lines(headers: dict[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def _ended_requests(record: LoadRecord, tokens: Sequence[int] | None) -> tuple[LoadRecord, Sequence[int] | None]:
    """The record of the requests that have ended, and the tokens of each."""
    ended = np.isfinite(record.ended_s)
    columns = {name: values[ended] for name, values in vars(record).items() if name != "duration_s"}
    return replace(record, **columns), tokens and np.resize(tokens, len(ended))[ended].tolist()


def _finish(
    summary: report.Summary | prompts.TextSummary, source: _InterruptibleLoad, out: Path, written: str, console: Console
) -> None:
    """Write the figures, and print the server's errors for requests without an answer."""
    report.write(summary, out)
    for status, body in sorted(source.errors.items()):
        if body:
            console.print(f"status {status}: {body[:SHOWN_BYTES].decode(errors='replace')}")
    console.print(written)
    if source.interrupted:
        console.print("interrupted: these are the figures of the requests that had ended")
        raise typer.Exit(INTERRUPTED)
    if report.is_failure(summary.outcomes):
        raise typer.Exit(1)


def _run(arriving: ArrivalOptions, clients: int | None, seconds: float, console: Console, source: Any) -> Any:
    if clients:
        return source.by_clients(clients, seconds)
    if arriving.trace_text:
        console.print(arriving.trace_text, highlight=False)
    return source.at(arriving.times_s(seconds))


def _load_prompts(
    source: _InterruptiblePromptLoad, run: Callable[[Any], Any], slo_ms: float, out: Path, console: Console
) -> None:
    with console.status("sending prompts"):
        record = source.record(run(source), slo_ms)
    texts = zip(source.texts(record), np.isfinite(record.ended_s), strict=True)
    summary = prompts.summed([text for text, ended in texts if ended or not source.interrupted], slo_ms)
    console.print(prompts.table(summary, slo_ms))
    _finish(summary, source, out, f"written to {out}", console)


def _tokens(path: Path) -> tuple[int, ...]:
    lengths = read_lengths(path)
    if len(lengths) > MOST_TEXTS:
        raise UserError(f"{path} has {len(lengths)} lines; at most {MOST_TEXTS} are possible: give a sample of them")
    return lengths


def _bodies(
    url: str, key: dict[str, str], data: Path | None, reading: ReadingOptions, max_rows: int, bodies: Path | None,
    console: Console,
) -> list[bytes]:  # fmt: skip

    if bodies:
        return bodies_in(bodies)
    accepted = accepted_at(url, key)
    if data is None:
        description, contents = made_up(accepted)
        sending = f"sending {len(contents)} {description}; --data sends your own"
        console.print(f"{url} takes {'texts' if accepted.texts else 'images'}: {sending}", highlight=False)
        return contents

    rows = reading.rows(console, data, accepted.channels, pairs=True)
    return bodies_of(sampled((row.value for row in rows), max_rows))
