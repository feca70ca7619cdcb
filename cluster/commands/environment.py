"""`isobatch environment`: what a node of a cluster needs in its environment before Ray starts there."""

from pathlib import Path
from typing import Annotated

import typer

LONGEST = 29  # characters: HAProxy's sockets have 97, of which Ray and we need 68 below the folder


def environment(
    folder: Annotated[
        Path, typer.Option(help="Where HAProxy's files go: a short path that only you may write to.")
    ] = Path("~/.isobatch"),
) -> None:
    """Print the settings for `ray start` as lines for a shell, and write the files that they name.

    Example: [bold]isobatch environment[/] as in  eval "$(isobatch environment)"; ray start --head
    """
    import shlex

    from cluster.serving.haproxy import MAX_CONNECTIONS, guarded, ready
    from deployments.ray_settings import PORTS_OF_PROXY, node_settings
    from profiles.errors import UserError

    place = folder.expanduser().absolute()
    if len(str(place)) > LONGEST:
        raise UserError(f"--folder {place} is too long for sockets: at most {LONGEST} characters")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = guarded(place, (PORTS_OF_PROXY["stats"], PORTS_OF_PROXY["metrics"]))
    ready(place)  # nobody tells a node of a cluster when an application is
    for name, value in node_settings(str(place), program, MAX_CONNECTIONS).items():
        print(f"export {name}={shlex.quote(value)}")
