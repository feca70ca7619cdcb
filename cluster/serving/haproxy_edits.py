"""Runs in place of HAProxy's program: edits the configuration that Ray has written, then becomes that program.

`write_script` (cluster/serving/haproxy.py) copies this file into the folder of HAProxy's files, beside the edits. Each
start of HAProxy waits for it, so it imports nothing but parts of the standard library.
"""

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

EDITS = "edits.json"  # the file of the edits
EDITED = "# isobatch"  # a configuration with this text needs no edits
# The state of the server: a file with this name exists in the folder until the server is ready, ...
STARTING = "starting"
# ... and a file with this name once the server stops.
STOPPING = "stopping"
READY = "ready"  # the state in between, without a file
# The requests of a backend that Serve's own proxy holds at once while HAProxy knows no front, unless `further` says
# another number. Each costs it milliseconds of a core, which the next front needs to start.
HELD = 8
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


class Edits(NamedTuple):
    """Our lines for the sections of the configuration, and what the edits depend on."""

    program: str  # HAProxy's own
    kernel_file: str  # names the clock of a machine
    slo_map: str  # the file with the SLO of each backend
    ports: Sequence[str]  # the ports that listen on 127.0.0.1 only
    near: Sequence[str]  # the addresses of this node
    defaults: Sequence[str]
    frontend: Sequence[str]
    backend: Sequence[str]  # of each application
    spread: str  # the deployment among whose fronts HAProxy shares requests
    aside: Sequence[str]  # for its further backends, which have the same servers and reserved connections
    # By the end of the name of each further backend: the condition of its requests, how long they wait for a place, and
    # how many Serve's own proxy holds.
    further: Mapping[str, tuple[str, int, int]]


def main(folder: Path, arguments: Sequence[str]) -> None:
    edits = Edits(**json.loads((folder / EDITS).read_text()))
    state = next((each for each in (STOPPING, STARTING) if (folder / each).exists()), READY)
    for option, value in pairwise(arguments):
        if option == "-f" and EDITED not in (config := Path(value).read_text()):
            Path(value).write_text(edited(config, edits, folder, state))
            with suppress(OSError, ValueError):  # a full disk or a damaged file: HAProxy starts all the same
                _forget_deleted(Path(edits.slo_map), _backends(config))
    kernel = Path(edits.kernel_file)  # of this machine: another machine may have written the edits
    os.environ["ISOBATCH_KERNEL"] = kernel.read_text().strip() if kernel.exists() else ""
    if sys.platform == "linux":  # HAProxy ends with its parent: the next one would share the port with this one
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execv(edits.program, [edits.program, *arguments])


def edited(config: str, edits: Edits, folder: Path, state: str) -> str:
    """Ray's configuration with our lines. `state` names the sentence for requests that no front can take."""
    backends, as_json = _backends(config), "content-type application/json"
    status, sentence = ("404", "404") if backends and state != STOPPING else ("503", state)
    uses = [rf"use_backend \1:{end} if is_\1 {condition}" for end, (condition, *_) in edits.further.items()]
    backup = {READY: rf"\1 {_backup(HELD)}\n", STARTING: rf"\1 {_backup(HELD)} disabled\n", STOPPING: ""}[state]
    for pattern, replacement in (
        (rf"( *bind +)[*]?:({'|'.join(edits.ports)})$", r"\g<1>127.0.0.1:\2"),
        (r" *errorfile .*\n", ""),
        (r"( *http-request return status) 404 .*", rf"\1 {status} {as_json} lf-file {folder}/{sentence}.json"),
        (
            r'(.* return status 50.) content-type text/plain string "(.*?)"',
            rf"""\1 {as_json} string '{{"error": "\2"}}'""",
        ),
        (r"defaults\n", rf"\g<0>{_text(edits.defaults)}"),
        (r"frontend http_frontend\n", rf"\g<0>{_text(edits.frontend)}"),
        (r" *use_backend (\S+) if is_\1$", rf"{_text(uses)}\g<0>"),
        (r"( *server .*) backup\n", backup),
    ):
        config = re.sub(f"^{pattern}", replacement, config, flags=re.MULTILINE)

    def with_more(section: re.Match[str]) -> str:
        name, lines = section.groups()
        return _with_more(name, lines.splitlines(), edits) if name in backends else section[0]

    config = re.sub(r"^backend (\S+)\n((?:[ \t].*\n|\n)*)", with_more, config, flags=re.MULTILINE)
    return config.replace(f"/{READY}.json", f"/{state}.json")


def _backends(config: str) -> list[str]:
    """The backends of the applications."""
    return [match[1] for match in re.finditer(r"^ *use_backend (\S+) if is_\1$", config, re.MULTILINE)]


def _with_more(name: str, lines: Sequence[str], edits: Edits) -> str:
    """The backend of an application with our lines, and its further backends.

    Fronts of other nodes come last: their own HAProxy fills them, and only theirs learns of their limits at once.
    """
    servers = [words for line in lines if (words := line.split())[:1] == ["server"]]
    servers.sort(key=lambda words: words[2].rpartition(":")[0] not in edits.near)
    others = [line.strip() for line in lines if line.split()[:1] != ["server"]]
    is_spread = any(words[1].rpartition("-")[0].endswith(f"-{edits.spread}") for words in servers)
    balance = ["balance leastconn"] if is_spread else []
    sections = {name: [*edits.backend, *balance, *others, *map(" ".join, servers)]}
    for end, (_, wait_ms, held) in edits.further.items():
        rules = [*edits.aside, *balance, f"timeout queue {wait_ms}"]
        sections[f"{name}:{end}"] = [*rules, *(_tracking(name, held, *words) for words in servers)]
    return "".join(f"backend {each}\n{_text(rules)}" for each, rules in sections.items())


def _backup(held: int) -> str:
    return f"maxconn {held} backup"


def _tracking(backend: str, held: int, _: str, server: str, address: str, *options: str) -> str:
    """A server that is up while the same server in another backend is up."""
    kept = {"check": f"track {backend}/{server}", "backup": _backup(held), "disabled": "disabled"}
    return " ".join(["server", server, address, *(kept[each] for each in options if each in kept)])


def _text(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _forget_deleted(slo_map: Path, backends: Sequence[str]) -> None:
    """Remove deleted applications from the map; without any backend, Serve itself starts and knows none yet."""
    lines = slo_map.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.partition(" ")[0].partition(":")[0] in backends]
    if backends and kept != lines:
        draft = slo_map.with_name(f"{slo_map.name}.{os.getpid()}")
        draft.write_text("".join(kept))
        draft.replace(slo_map)


if __name__ == "__main__":
    main(Path(__file__).parent, sys.argv[1:])
