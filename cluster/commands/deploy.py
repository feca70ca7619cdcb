"""What a cluster needs: `isobatch deploy`, `environment`, `kubernetes` and `dashboards`."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import copy
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from isobatch.cluster.commands import above_0, check_writable
from isobatch.cluster.commands.shared_options import check_unread
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import write_whole

LONGEST_PATH_BYTES = 29  # bytes: a path of HAProxy's sockets has at most 97, of which 68 are needed below the folder
OTHERS_RIGHTS = 0o077  # the rights of other users in a folder's mode
PATIENCE_S = 600.0  # the default of --patience-s
ANSWERS_WITHIN_S = 10.0  # how long a front may take to say its plan
PLAN_KEPT = "its plan or profile has new content, but the plan of before runs on: give the new file another name"
HTTP_KEPT = "http_options of the file are ignored: Serve reads them only when it starts, and listens on {host}:{port}"
DASHBOARDS = Path(__file__).parents[1] / "grafana"


def deploy(
    file: Annotated[Path, typer.Argument(help="A Serve file (*.yaml).")],
    address: Annotated[
        str, "The cluster's address, as HOST:6379; auto: the cluster that this machine belongs to."
    ] = "auto",
    check: Annotated[bool, typer.Option(help="Only check every node, and deploy nothing.")] = False,
    others: Annotated[
        Literal["keep", "end"] | None,
        "Keep or end applications that run there and are not in FILE. Required if there are any.",
    ] = None,
    patience_s: Annotated[float, "Seconds that the start may take."] = PATIENCE_S,
) -> None:
    """Deploy a Serve file onto a running cluster, once every node has what it needs. Run it on one of the nodes.

    Example: [bold]isobatch deploy serve.yaml --address auto[/]
    """
    from isobatch.cluster.serving.serve_file import serve_file

    above_0("--patience-s", patience_s)
    check_unread({"--patience-s": check and patience_s != PATIENCE_S}, "is for a start: leave it out with --check")
    run(serve_file(file, {}), address, check, others, patience_s)


def run(content: dict[str, Any], address: str, check: bool, others: str | None, patience_s: float) -> None:
    import sys

    from isobatch.cluster.commands.serve import progress_printer, url
    from isobatch.cluster.serving import applications
    from isobatch.cluster.serving.capacity import check_capacity
    from isobatch.cluster.serving.local import attached, while_serving
    from isobatch.cluster.serving.readiness import check_nodes
    from isobatch.cluster.serving.serve_file import check_ports, with_demo
    from isobatch.deployments.ray_facts import declared_applications, nodes

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    requested = with_demo(content)
    http = requested["http_options"]
    with console.status("Connecting") as status, attached(address) as serving, while_serving(address):
        show_progress = progress_printer(console, status.update, aside.print)
        show_progress("Checking every node")
        if (running := running_http()) and running != {name: http[name] for name in running}:
            http = http | running
            aside.print(HTTP_KEPT.format(**http))
        requested |= {"http_options": http}
        check_nodes(requested)
        complete = applications.beside(requested, declared_applications(), others)
        check_ports(complete)
        check_capacity(complete, nodes())
        if not check:
            try:
                applications.deploy(serving(http), complete, patience_s, show_progress)
            except UserError:
                check_unchanged(requested["applications"], declared_applications())  # another deploy may be the reason
                raise
            check_unchanged(requested["applications"], declared_applications())
            for name in kept_plans(requested):
                aside.print(f"{name}: {PLAN_KEPT}")
    done = f"[bold green]deployed[/]: {escape(url(http))} on every node that serves"
    console.print("nothing is missing there" if check else done)


def running_http() -> dict[str, Any] | None:
    """Host and port of the Serve that runs there; None: none runs."""
    from isobatch.deployments.ray_facts import http_options, serve_client

    if serve_client() is None:
        return None
    http = http_options()
    return {"host": http.host, "port": http.port}


def check_unchanged(deployed: Sequence[dict[str, Any]], running: Sequence[dict[str, Any]]) -> None:
    """Raise UserError if another deploy has changed or ended one of these applications meanwhile."""
    from isobatch.cluster.serving.serve_file import name_of

    theirs = {name_of(each): each.get("args") or {} for each in running}
    if changed := [name_of(each) for each in deployed if theirs.get(name_of(each)) != (each.get("args") or {})]:
        names = ", ".join(changed)
        raise UserError(f"another deploy has changed or ended {names} meanwhile: deploy this file again to have it run")


def kept_plans(content: dict[str, Any]) -> Iterator[str]:
    """The applications that keep a plan of changed files: Serve restarts nothing while `args:` are the same."""
    from isobatch.cluster.serving.serve_file import classifiers, decoders, name_of
    from isobatch.deployments.config import AppConfig, checked
    from isobatch.deployments.graph import plan_hash
    from isobatch.deployments.ray_facts import stored_plan

    for application in classifiers(content):
        config, running = checked(AppConfig, application["args"]), stored_plan(name_of(application))
        if config.planned and running and running.origin != plan_hash(config):
            yield name_of(application)
    for application in decoders(content):
        if (plan := application["args"].get("plan")) and _keeps_another(name_of(application), plan):
            yield name_of(application)


def _keeps_another(decoder: str, plan: str) -> bool:
    """Whether a running decoder began with another plan than this file has now. False if it does not answer."""
    from ray import serve

    from isobatch.deployments.deployer.steps import FRONT
    from isobatch.deployments.sources import local
    from isobatch.optimizer.plan import read_plan

    with suppress(Exception):
        first = serve.get_deployment_handle(FRONT, decoder).first.remote().result(timeout_s=ANSWERS_WITHIN_S)
        return bool(first != read_plan(local(plan)))
    return False


def environment(
    folder: Annotated[Path, "Folder for HAProxy's files: a short path, open only to you."] = Path("~/.isobatch"),
) -> None:
    """Print the settings for `ray start` as shell commands, and write the files that they name.

    Example: [bold]isobatch environment[/] as in  eval "$(isobatch environment)"; ray start --head
    """
    import os
    import shlex

    from isobatch.cluster.serving.haproxy import MAX_CONNECTIONS, PLAIN, ready, write_script
    from isobatch.deployments.front.proxy import allowed_connections
    from isobatch.deployments.ray_settings import PORTS_OF_PROXY, files_of_a_node, hide_token, node_settings

    place = folder.expanduser().absolute()
    if len(os.fsencode(place)) > LONGEST_PATH_BYTES:
        raise UserError(f"--folder {place} is too long for sockets: at most {LONGEST_PATH_BYTES} bytes")
    if not PLAIN.fullmatch(str(place)):
        raise UserError(f"--folder {place}: HAProxy reads no blanks, quotes, # or $ in paths: name another folder")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.stat().st_uid != os.geteuid():
        raise UserError(f"--folder {place} belongs to another user, who could give HAProxy commands: name your own")
    if place.stat().st_mode & OTHERS_RIGHTS:
        raise UserError(f"--folder {place} is open to others, who could give HAProxy commands: chmod 700 {place}")
    hide_token()
    connections = allowed_connections(MAX_CONNECTIONS)
    program = write_script(place, (PORTS_OF_PROXY["stats"], PORTS_OF_PROXY["metrics"]), connections)
    ready(place)  # a cluster's node does not know when an application is ready
    for name, value in node_settings(str(place), program, connections).items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"ulimit -Sn {files_of_a_node()}")


def kubernetes(
    file: Annotated[Path, typer.Argument(help="A Serve file (*.yaml) with a plan, as isobatch serve --out writes it.")],
    image: Annotated[str, "The image of every node, with your files in its folder /models."],
    storage_class: Annotated[str, "A class of volumes to which several nodes may write, for the controller's memory."],
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            help="How nodes with a kind of device are labelled, if not as on GKE; again for each kind.",
            metavar="KIND=LABEL:VALUE",
        ),
    ] = None,
    out: Annotated[Path | None, "Write to this file instead of printing."] = None,
) -> None:
    """Write a RayService with a group of nodes for each kind of device of the plan, and a volume.

    docs/deploy.md ("Kubernetes") has the other steps: the image, and the secret with the key.

    Example: [bold]isobatch kubernetes serve.yaml --image IMAGE --storage-class standard-rwx | kubectl apply -f -[/]
    """
    import sys

    from isobatch.cluster.serving.kubernetes import as_yaml, files, labels, objects
    from isobatch.cluster.serving.serve_file import plan_files, serve_file

    content = serve_file(file, {})
    text = as_yaml(objects(content, image, storage_class, labels(nodes or ())))
    if out:
        check_writable(out, file, *plan_files(content))
        write_whole(out, text)
    else:
        print(text, end="")
    for here, there in files(content).items():
        print(f"the image needs {here} as {there}", file=sys.stderr)


def dashboards(
    out: Annotated[Path, "Folder for the files."] = Path("monitoring"),
    force: Annotated[bool, "Replace files that were changed."] = False,
) -> None:
    """Write dashboard.json for Grafana and alerts.yaml for Prometheus. docs/watching.md explains how to use them.

    Example: [bold]isobatch dashboards[/]
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: it is a file: name a folder")
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(DASHBOARDS.iterdir())
    for file in files:
        if not force and (out / file.name).exists() and (out / file.name).read_bytes() != file.read_bytes():
            raise UserError(f"{out / file.name} is not as this version writes it: name another --out, or give --force")
    for file in files:
        print(f"wrote {copy(file, out)}")
