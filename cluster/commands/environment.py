"""`isobatch environment`: prints the environment variables that a cluster's node needs before Ray starts there."""

from pathlib import Path
from typing import Annotated

import typer

LONGEST = 29  # characters: a path of HAProxy's sockets has at most 97, of which 68 are needed below the folder


def environment(
    folder: Annotated[
        Path, typer.Option(help="Folder for HAProxy's files: a short path to which only you can write.")
    ] = Path("~/.isobatch"),
) -> None:
    """Print the settings for `ray start` as shell commands, and write the files that they name.

    Example: [bold]isobatch environment[/] as in  eval "$(isobatch environment)"; ray start --head
    """
    import shlex

    from isobatch.cluster.serving.haproxy import MAX_CONNECTIONS, ready, write_script
    from isobatch.deployments.front.proxy import allowed_connections
    from isobatch.deployments.ray_settings import PORTS_OF_PROXY, node_settings
    from isobatch.profiles.errors import UserError

    place = folder.expanduser().absolute()
    if len(str(place)) > LONGEST:
        raise UserError(f"--folder {place} is too long for sockets: at most {LONGEST} characters")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    connections = allowed_connections(MAX_CONNECTIONS)
    program = write_script(place, (PORTS_OF_PROXY["stats"], PORTS_OF_PROXY["metrics"]), connections)
    ready(place)  # a cluster's node does not know when an application is ready
    for name, value in node_settings(str(place), program, connections).items():
        print(f"export {name}={shlex.quote(value)}")
