"""`isobatch deploy`: deploys a Serve file onto a running Ray cluster."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def deploy(
    file: Annotated[Path, typer.Argument(help="A Serve file (*.yaml).")],
    address: Annotated[
        str, typer.Option(help="The cluster's address, as HOST:6379; auto: the cluster that this machine belongs to.")
    ] = "auto",
    check: Annotated[bool, typer.Option(help="Only check every node, and deploy nothing.")] = False,
    others: Annotated[
        Literal["keep", "end"] | None,
        typer.Option(help="Keep or end applications that run there and are not in FILE. Required if there are any."),
    ] = None,
    patience_s: Annotated[float, typer.Option(help="Seconds that the start may take.")] = 600.0,
) -> None:
    """Deploy a Serve file onto a running cluster, once every node has what it needs. Run it on one of the nodes.

    Example: [bold]isobatch deploy serve.yaml --address auto[/]
    """
    from isobatch.cluster.serving.serve_file import serve_file

    run(serve_file(file, {}), address, check, others, patience_s)


def run(content: dict[str, Any], address: str, check: bool, others: str | None, patience_s: float) -> None:
    import sys

    from rich.console import Console

    from isobatch.cluster.commands.serve import progress_printer, url
    from isobatch.cluster.serving.applications import deploy as put
    from isobatch.cluster.serving.capacity import check_capacity
    from isobatch.cluster.serving.local import attached
    from isobatch.cluster.serving.readiness import check_nodes
    from isobatch.cluster.serving.serve_file import beside, with_demo
    from isobatch.deployments.ray_facts import declared_applications, nodes

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    requested = with_demo(content)
    with console.status("Connecting") as status, attached(address) as serving:
        show_progress = progress_printer(console, status.update, aside.print)
        show_progress("Checking every node")
        check_nodes(requested)
        complete = beside(requested, declared_applications(), others)
        check_capacity(complete, nodes())
        if not check:
            put(serving(complete["http_options"]), complete, patience_s, show_progress)
    base = url(requested["http_options"])
    console.print("nothing is missing there" if check else f"[bold green]deployed[/]: {base} on every node that serves")
