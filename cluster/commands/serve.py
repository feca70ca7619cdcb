"""`isobatch serve`: serves a model over HTTP on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from isobatch.cluster.client import stats_at
from isobatch.cluster.commands import INTERRUPTED, above_0, check_writable, key_headers
from isobatch.cluster.commands.shared_options import check_unread, flag
from isobatch.deployments.named import DEMO_NAME, LLM_DEMO_NAME, Dtype
from isobatch.deployments.resources import gpus_here
from isobatch.deployments.sources import local
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import write_whole

if TYPE_CHECKING:
    from isobatch.cluster.serving.local import LocalRay

SAME_SIGNAL_S = 0.5  # signals within this time count as one: a terminal that closes may send two
STATS_KEYS = {"requests", "exits"}  # in the statistics of every isobatch application
SHORTEST_FILE = 600  # characters: a longer example request is written to a file
STATS_EVERY_S = 0.5
PATIENCE_S = 300.0  # the default of --patience-s
OF_PROFILES = {"plan", "devices", "backend"}  # fields of `args:` of which at least one is there if a profile is read


def serve(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A model's directory, hub id or URL (hf://, s3://, gs://, file://), a Serve file (*.yaml), or "
            "llm-demo, which writes sums; none: the built-in demo."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; by default the file's, or 127.0.0.1.", envvar="ISOBATCH_HOST"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port for HTTP; by default the file's, or 8000.")
    ] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port for gRPC; by default the file's, or 8001 if free; 0: no gRPC."),
    ] = None,
    device: Annotated[
        str | None, "cpu or cuda; by default the file's, or for a model's directory a GPU if there is one."
    ] = None,
    dtype: Annotated[
        Dtype | None, "Precision; by default the file's or the plan's, or that of the ramps; int8 on CPUs only."
    ] = None,
    backend: Annotated[str | None, "torch, onnx, ...; by default the file's, the plan's, or torch."] = None,
    slo_ms: Annotated[
        float | None, typer.Option(help="An answer's deadline; by default the file's, the plan's, or 1000.")
    ] = None,
    max_batch: Annotated[int | None, "The largest batch without a plan; by default the file's, or 32."] = None,
    replicas: Annotated[
        int | None,
        "Without a plan: replicas of the whole network, one CPU or GPU each; by default the file's, or 1.",
    ] = None,
    api_key_variable: Annotated[str | None, "Environment variable with the key that requests must send."] = None,
    plan: Annotated[
        Path | None, "A file of isobatch plan: each split runs on its own replicas, and a controller is added."
    ] = None,
    profile: Annotated[
        Path | None, "The file of isobatch profile from which the plan was made; decoders need none."
    ] = None,
    out: Annotated[Path | None, "Only write a Serve file with these options, for isobatch simulate and deploy."] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard too, on 127.0.0.1 only.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port for Prometheus's /metrics; none: any free port.")
    ] = None,
    patience_s: Annotated[float, "Seconds that the start may take."] = PATIENCE_S,
) -> None:
    """Serve a model at http://127.0.0.1:8000 on its own Ray, until Ctrl-C.

    Example: [bold]isobatch serve[/], and it prints a line to try

    Example: [bold]isobatch serve my-bert-ee --plan plan.json --profile profile.json[/], then
    curl -d '{"inputs": ["a good film", "a dull film"]}' http://127.0.0.1:8000/predict

    Example: [bold]isobatch serve s3://models/my-bert-ee[/]
    """
    from isobatch.cluster.serving.ports import is_claimed, is_free
    from isobatch.cluster.serving.serve_file import classifiers, serve_file, served, with_grpc

    above_0("--patience-s", patience_s)
    files = {name: str(path.resolve()) for name, path in (("plan", plan), ("profile", profile)) if path}
    fields = {
        "device": device, "dtype": dtype, "backend": backend, "slo_ms": slo_ms, "max_batch": max_batch,
        "replicas": replicas, "api_key_variable": api_key_variable,
    }  # fmt: skip
    overrides = files | {name: value for name, value in fields.items() if value is not None}
    # A written file contains no default gRPC port: whether that is free is decided on the machine that serves the file.
    content = serve_file(target, overrides)
    is_decided = device or out or not _is_model(target) or "plan" in served(content)[0]["args"]
    if not is_decided and gpus_here():
        content = serve_file(target, overrides | {"device": "cuda"})
    content["http_options"] |= {name: value for name, value in (("host", host), ("port", port)) if value}
    content = with_grpc(content, host, grpc_port, lambda *at: not out and is_free(*at) and not is_claimed(*at))
    others = {flag(name): value for name, value in (overrides | {"grpc_port": grpc_port}).items() if value is not None}
    check_unread({} if served(content) else others, "is for applications of isobatch, and the file has none")
    if profile and any(each["args"].keys().isdisjoint(OF_PROFILES) for each in classifiers(content)):
        raise UserError(f"--profile {profile} is for a plan: give --plan too")
    if out:
        starting = {"--dashboard": dashboard, "--metrics-port": metrics_port, "--patience-s": patience_s != PATIENCE_S}
        check_unread(starting, "is for a server that starts here: --out only writes a file")
        write(content, out)
        return
    run(content, dashboard, patience_s, metrics_port)


def _is_model(target: str | None) -> bool:
    return target not in (None, DEMO_NAME, LLM_DEMO_NAME) and not Path(target or "").is_file()


def write(content: dict[str, Any], out: Path) -> None:
    """Write a Serve file with absolute paths."""
    import yaml

    from isobatch.cluster.serving.serve_file import plan_files

    check_writable(out, *plan_files(content))
    write_whole(out, yaml.safe_dump(content, sort_keys=False))
    runs = f"isobatch serve {out} runs it here, isobatch deploy {out} --address auto on a cluster"
    print(f"written to {out}: {runs}", file=sys.stderr)  # standard output may be JSON


def run(content: dict[str, Any], dashboard: bool, patience_s: float, metrics_port: int | None) -> None:
    """Start the applications, serve until a signal comes, and stop."""
    from isobatch.cluster.serving import serve_file as files
    from isobatch.cluster.serving.applications import deploy
    from isobatch.cluster.serving.capacity import check_capacity, check_machine
    from isobatch.cluster.serving.local import check_place, local_nodes, local_ray
    from isobatch.cluster.serving.ports import claimed
    from isobatch.deployments.own_cores import usable_cores
    from isobatch.deployments.tracing import check_tracing

    check_tracing()
    # This console keeps the current stdout, which is redirected while Ray stops.
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    stop = threading.Event()
    http = content["http_options"]
    base = url(http)
    _on_signals(_end_at_once)  # until it is ready: Serve would wait drain_s for a front that is still starting
    more = local_nodes(content)
    check_machine(content, usable_cores() + sum(node.cpus for node in more), gpus_here)
    check_place(http["host"], http["port"])
    grpc = files.grpc_addresses(content)
    _check_more_ports(http["port"], grpc, metrics_port)
    complete = files.with_demo(content)
    status = console.status("Starting Ray")
    aside = Console(stderr=True, highlight=False, soft_wrap=True)  # nothing is printed on stdout before "ready"
    show_progress = progress_printer(console, status.update, aside.print)
    show_progress("Starting Ray")
    with (
        claimed([(http["host"], http["port"]), *grpc]),
        status,
        local_ray(http, dashboard, more, metrics_port, partial(check_capacity, complete)) as ray,
    ):
        show_progress("Starting the network")
        deploy(ray, complete, patience_s, show_progress)
        status.stop()
        _on_signals(partial(_stop_in_order, stop))
        fronts = fronts_of(base, complete)
        for place, _ in fronts.values():
            console.print(ready(place))
        if files.served(complete):
            at = ", ".join(f"{host}:{port}" for host, port in grpc)
            console.print(f"gRPC: {at or f'not served ({files.GRPC_PORT} is taken, or it was switched off)'}")
        if metrics_port:
            console.print(f"metrics: http://127.0.0.1:{metrics_port}/metrics")
        _show_example(console, base, example(content), ray.folder)
        for place, headers in fronts.values():
            if plan := stats_at(place, headers).get("plan"):
                console.print(f"plan: {plan}", markup=False)
        _watch(console, fronts, stop, ray)
        status.update("Stopping: admitted requests are answered first (Ctrl-C again: stop at once)")
        status.start()
    console.print("stopped")


def fronts_of(base: str, content: dict[str, Any]) -> dict[str, tuple[str, dict[str, str]]]:
    """By the name of each application of isobatch: its address, and the header with its key. With none: the server."""
    from isobatch.cluster.serving.serve_file import name_of, prefix_of, served

    def front(application: dict[str, Any]) -> tuple[str, dict[str, str]]:
        return f"{base}{prefix_of(application)}", key_headers(application["args"].get("api_key_variable"))

    return {name_of(each): front(each) for each in served(content)} or {"": (base, {})}


def _check_more_ports(http: int, grpc: Sequence[tuple[str, int]], metrics: int | None) -> None:
    from isobatch.cluster.serving.ports import check_port

    for each in grpc:
        check_port(*each, "--grpc-port")
    if metrics:
        check_port("0.0.0.0", metrics, "--metrics-port")
    if metrics in (http, *(port for _, port in grpc)):
        raise UserError(f"--metrics-port {metrics} is that of HTTP or gRPC, too: name another")


def progress_printer(
    console: Console, on_terminal: Callable[[str], None], in_log: Callable[[str], None]
) -> Callable[[str], None]:
    """A function that shows the progress of the start: on a terminal a line that changes, otherwise new lines only."""
    if console.is_terminal:
        return on_terminal
    last = ""

    def show_progress(progress: str) -> None:
        nonlocal last
        if progress != last:
            last = progress
            in_log(progress)

    return show_progress


def url(http: dict[str, Any]) -> str:
    """
    >>> url({"host": "0.0.0.0", "port": 8000})
    'http://127.0.0.1:8000'
    >>> url({"host": "::1", "port": 8000})
    'http://[::1]:8000'
    """
    host = "127.0.0.1" if http["host"] in ("0.0.0.0", "::") else http["host"]
    return f"http://{f'[{host}]' if ':' in host else host}:{http['port']}"


def ready(place: str) -> Text:
    """
    >>> ready("http://[fd00::5]:8000").plain
    'ready at http://[fd00::5]:8000  (open it in a browser; explained at http://[fd00::5]:8000/docs)'
    """
    return Text.assemble(("ready", "bold green"), f" at {place}  (open it in a browser; explained at {place}/docs)")


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # with nohup, the server must outlive its terminal
        signal.signal(signal.SIGHUP, partial(_hung_up, handler))


def _hung_up(handler: Any, *signalled: Any) -> None:
    """Discard all further output, because the terminal has closed and writing to it would fail. Then stop."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    handler(*signalled)


def _stop_in_order(stop: threading.Event, *_: object) -> None:
    """At the first signal, stop in order; at a second one, stop at once."""
    _on_signals(partial(_second_signal, time.monotonic()))
    stop.set()


def _second_signal(first_s: float, *_: object) -> None:
    if time.monotonic() - first_s > SAME_SIGNAL_S:
        _end_at_once()


def _end_at_once(*_: object) -> None:
    from isobatch.cluster.serving.local import leave_nothing

    leave_nothing(patience_s=0.2)
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h\n")  # shows the cursor again, and a prompt on its own line
    os._exit(INTERRUPTED)


def example(content: dict[str, Any]) -> tuple[str, str, str | None] | None:
    """The path and the JSON body of a request to the first isobatch application, and the variable with its key; None:
    none is known for its network."""
    from isobatch.cluster.serving.serve_file import classifiers, decoders, prefix_of
    from isobatch.deployments.demo.sums import prompt_of
    from isobatch.deployments.front.examples import example_of

    if not (applications := decoders(content) or classifiers(content)):
        return None
    prefix, arguments = prefix_of(applications[0]), applications[0].get("args") or {}
    variable = arguments.get("api_key_variable")
    if decoders(content):
        body = {"prompt": prompt_of(47, 85), "max_tokens": 24}
        return f"{prefix}/v1/completions", json.dumps(body), variable
    model = arguments.get("model")
    value = example_of(model and local(model)).value
    if value is None:
        return None
    return f"{prefix}/predict", json.dumps({"inputs": [value]}, separators=(",", ":")), variable


def _show_example(console: Console, base: str, request: tuple[str, str, str | None] | None, folder: Path) -> None:
    if request is None:
        return
    path, body, variable = request
    if len(body) > SHORTEST_FILE:
        file = folder / "example.json"
        file.write_text(body)
        body = f"@{file}"
    key = f' -H "X-API-Key: ${variable}"' if variable else ""
    console.print(f"try it:  curl{key} -d '{body}' {base}{path}", markup=False)


def _watch(
    console: Console, fronts: Mapping[str, tuple[str, dict[str, str]]], stop: threading.Event, ray: LocalRay
) -> None:
    """Show a line with the current figures of each application, twice a second, until `stop` is set."""
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while not stop.wait(STATS_EVERY_S):
            if not ray.alive():
                from isobatch.cluster.serving.local import logs

                console.print(f"[bold red]Ray ended unexpectedly[/]: start again; its logs are in {logs()}")
                raise typer.Exit(1)
            lines = {name: _line(*front) for name, front in fronts.items()}
            text = "\n".join(f"{name}: {line}" if len(lines) > 1 else line for name, line in lines.items())
            live.update(Text(text), refresh=True)


def _line(place: str, headers: Mapping[str, str]) -> str:
    stats = stats_at(place, headers)
    if not stats.keys() >= STATS_KEYS:  # an application of another program, or none
        return f"no figures from {place}/stats | Ctrl-C stops"
    exits = {int(block): count for block, count in stats["exits"].items()}
    inputs = sum(exits.values())
    depth = sum((block + 1) * count for block, count in exits.items()) / inputs if inputs else 0.0
    requests = ", ".join(f"{count} {outcome}" for outcome, count in stats["requests"].items())
    if "tokens_per_s" in stats:
        done = f"tokens: {inputs}, {depth:.1f} of {len(exits)} blocks each, {stats['tokens_per_s']:.0f}/s"
        return f"requests: {requests} | {done} | {stats['residents']} resident, {stats['waiting']} wait | Ctrl-C stops"
    typical = f"p50 {stats['latency_ms']['p50']:.0f} ms | " if stats["latency_ms"] else ""
    full = ", ".join(f"{split['fill']:.0%}" for split in stats["splits"])
    done = f"inputs: {inputs}, {depth:.1f} of {len(exits)} blocks each"
    return f"requests: {requests} | {typical}{done} | batches {full} full | Ctrl-C stops"
