"""HAProxy as Serve runs it, with additions that Ray has no setting for: local statistics, limits, errors in JSON.

At every change Ray writes the configuration and starts HAProxy. A script of ours takes the place of HAProxy's
program: it edits the configuration, then starts the real one, or rather a copy of it: what is not HTTP at all is
answered from pages that are built into the program, whatever the configuration says, and the copy's are JSON.
"""

import contextlib
import json
import re
import shlex
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

from deployments.front.headers import OPEN_PATHS
from deployments.front.proxy import (
    FEW,
    QUESTIONS,
    QUESTIONS_MS,
    QUEUED,
    QUEUED_MS,
    REQUEST_S,
    RETRY_S,
    asks_little,
    of_clients,
)
from deployments.ray_settings import haproxy_program
from profiles.errors import UserError

MAX_CONNECTIONS = 4096  # of all clients; HAProxy needs twice as many file handles
MAX_OF_ONE_ADDRESS = MAX_CONNECTIONS // 2  # so that no single client locks out the others
MOST_BYTES = 16 * 2**20  # a body that is said to be longer is not waited for: the front refuses it by that alone
ORDER_S = 2.0  # an order to HAProxy may take so long
SILENT_S = 60  # how long a client may neither send nor take anything while it should

_STARTING = "starting"  # this file exists in the folder until the server is ready
_STOPPING = "stopping"  # and this one once it stops
_SCRIPT = """#!/bin/sh
state=empty
for each in {starting} {stopping}; do
  if [ -e {folder}/$each ]; then state=$each; fi
done
for word in "$@"; do
  if [ "$before" = -f ] && ! grep -q '# isobatch' "$word"; then
    sed -i -E -f {folder}/haproxy.sed "$word"
    awk -f {folder}/aside.awk "$word" > {folder}/aside.cfg
    cat {folder}/aside.cfg >> "$word"
    sed -i "s#/empty.json#/$state.json#" "$word"
    if [ $state = {stopping} ] || ! grep -q '^ *use_backend' "$word"; then
      sed -i -E "s#^( *http-request return status) 404 (.*)/404.json#\\1 503 \\2/$state.json#" "$word"
    fi
    if [ $state = {stopping} ]; then
      sed -i '/^ *server .* backup$/d' "$word"
    fi
    if [ $state = {starting} ]; then
      sed -i -E 's/^( *server .* backup)$/\\1 disabled/' "$word"
    fi
  fi
  before=$word
done
exec {binary} "$@"
"""
_EDITS = r"""s/^( *bind +)[*]?:({ports})$/\1127.0.0.1:\2/
/^ *errorfile /d
/^defaults$/a\
{errorfiles}
s#^( *http-request return status 404) .*#\1 content-type application/json file {folder}/404.json#
s#(return status 50. content-type) text/plain string "([^"]*)"#\1 application/json string '{{"error": "\2"}}'#
/^frontend http_frontend$/a\
    # isobatch\
    timeout http-request {request_s}s\
    timeout client {silent_s}s\
{clients}\
    http-request set-header X-Request-Start t=%[date(0,us)]\
    http-request wait-for-body time {request_s}s if !{{ req.hdr_val(content-length) gt {most_bytes} }}\
    acl says_when res.hdr(retry-after) -m found\
    http-after-response set-header Retry-After %[rand({retry_s}),add(1)] if {{ status 503 }} !says_when
s/^ *use_backend ([^ ]+) if is_\1$/    use_backend \1:{questions} if is_\1 METH_GET !{{ req.body_len gt 0 }}\
    use_backend \1:{few} if is_\1 {asks_little}\n&/
/^ *http-reuse/a\
    timeout queue {queued_ms}\
    http-request {refuse}/empty.json if {{ nbsrv eq 0 }}\
    http-request {refuse}/crowded.json if {{ avg_queue gt {queued} }} {{ sc0_http_req_rate gt {queued} }}
"""
# Each backend gets two others with the same servers, whose places nobody else takes: one for clients who ask little,
# one for who only asks about the server. With a body that is still to come one would keep its place there.
_ASIDE = """$1 == "use_backend" {{ used[$2] = 1 }}
/^[a-z]/ {{ name = "" }}
$1 == "backend" && $2 in used {{ name = $2; servers[name] = "" }}
name && $1 == "server" {{
  seen = (/ check/ ? " track " name "/" $2 : "") (/ backup$/ ? " backup" : "")
  servers[name] = servers[name] "    server " $2 " " $3 seen "\\n"
}}
function backend(of, kind, waits_ms) {{
  print "backend " of ":" kind
  print "    http-reuse always"
  print "    timeout queue " waits_ms
  print "    http-request {refuse}/empty.json if {{ nbsrv eq 0 }}"
  printf "%s", servers[of]
}}
END {{
  for (each in servers) {{
{backends}
  }}
}}
"""
_PAGE = re.compile(rb"HTTP/1\.1 (\d{3}) ([\w -]+)\r\n(?:[\w-]+: [^\r\n]+\r\n)+\r\n<html>[^\0]+</html>\n(?=\0)")
_ERRORS = {
    400: ("Bad Request", "this is no HTTP request, or its headers are longer than is allowed"),
    403: ("Forbidden", "this is not allowed"),
    408: ("Request Timeout", f"the request was not here after {REQUEST_S} seconds"),
    413: ("Content Too Large", "the request is longer than is allowed"),
    429: ("Too Many Requests", "too much is asked at once"),
    500: ("Internal Server Error", "the proxy before the front failed"),
    501: ("Not Implemented", "the request asks for what is not known here"),
    502: ("Bad Gateway", "the front ended before it had answered"),
    503: ("Service Unavailable", "there are too many requests now, or a front has just ended: try again later"),
    504: ("Gateway Timeout", "the front did not answer"),
}
_REFUSALS = {  # with status 503, for a reason that HAProxy knows
    "crowded": "there are too many requests now: try again later",
    "empty": "no front is running now: another one starts",
    _STARTING: "this server starts: try again when it is ready",
    _STOPPING: "this server stops: it takes no more requests",
}


def guarded(folder: Path, ports: Collection[str]) -> str:
    """Write a script that Ray runs in HAProxy's place, and return its path; it makes these ports local."""
    for status, (reason, sentence) in _ERRORS.items():
        (folder / f"{status}.http").write_bytes(_reply(status, reason, sentence))
    for reason, sentence in _REFUSALS.items():
        (folder / f"{reason}.json").write_text(_json(sentence))
    (folder / "404.json").write_text(_json("there is no such path: GET /-/routes lists those that there are"))
    refuse = f"return status 503 content-type application/json file {folder}"
    edits = _EDITS.format(
        ports="|".join(ports),
        folder=folder,
        refuse=refuse,
        errorfiles=_added(f"errorfile {status} {folder}/{status}.http" for status in _ERRORS),
        request_s=REQUEST_S,
        most_bytes=MOST_BYTES,
        silent_s=SILENT_S,
        clients=_added(of_clients(MAX_OF_ONE_ADDRESS, f"METH_GET {{ path_end {' '.join(sorted(OPEN_PATHS))} }}")),
        queued_ms=QUEUED_MS,
        queued=QUEUED,
        retry_s=RETRY_S,
        asks_little=asks_little(QUEUED),
        few=FEW,
        questions=QUESTIONS,
    )
    (folder / "haproxy.sed").write_text(edits)
    waits = {FEW: QUEUED_MS, QUESTIONS: QUESTIONS_MS}
    backends = "\n".join(f'    backend(each, "{kind}", {waits_ms})' for kind, waits_ms in waits.items())
    (folder / "aside.awk").write_text(_ASIDE.format(refuse=refuse, backends=backends))
    script = folder / "haproxy"
    (folder / _STARTING).touch()
    told = {"folder": shlex.quote(str(folder)), "binary": shlex.quote(_copied(folder))}
    told |= {"starting": _STARTING, "stopping": _STOPPING}
    script.write_text(_SCRIPT.format(**told))
    script.chmod(0o700)
    return str(script)


def _added(lines: Iterable[str]) -> str:
    """As sed reads lines that it adds."""
    return "\\\n".join(f"    {line}" for line in lines)


def ready(folder: Path) -> None:
    """From now on HAProxy asks Serve's own proxy, where an application has no replica that it could ask itself.

    Until then it says 503: that proxy keeps requests until there is a replica, longer than their clients wait.
    """
    (folder / _STARTING).unlink(missing_ok=True)
    _order(folder, "enable")


def stopping(folder: Path) -> None:
    """Make HAProxy answer 503 where no front is left: now, and by its next configuration.

    Without this, it says 404 itself, or asks Serve's own proxy, which says 404 of an application that is being deleted.
    """
    (folder / _STOPPING).touch()
    _order(folder, "disable")


def _order(folder: Path, what: str) -> None:
    """Have the HAProxy that runs enable or disable the servers by which it reaches Serve's own proxy.

    Ray keeps the files of each node's HAProxy in a folder of their own, below the one that it was told.
    """
    for config in folder.rglob("haproxy.cfg"):
        orders = ";".join(f"{what} server {each}" for each in _backups(config))
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as haproxy:  # there may be none
            haproxy.settimeout(ORDER_S)
            haproxy.connect(str(config.with_name("admin.sock")))
            haproxy.sendall(orders.encode() + b"\n")
            haproxy.recv(1)  # it is done


def _backups(config: Path) -> list[str]:
    """The servers by which HAProxy reaches Serve's own proxy."""
    found, backend = [], ""
    for line in config.read_text().splitlines():
        match line.split():
            case ["backend", backend]:
                pass
            case ["server", server, *_, "backup"] | ["server", server, *_, "backup", "disabled"]:
                found.append(f"{backend}/{server}")
    return found


def _json(sentence: str) -> str:
    return json.dumps({"error": sentence})


def _reply(status: int, reason: str, sentence: str) -> bytes:
    body = _json(sentence)
    # Who is told 503 comes back, on the same connection.
    end = "" if status == 503 else "Connection: close\r\n"
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{end}"
    return f"HTTP/1.1 {status} {reason}\r\n{headers}\r\n{body}".encode()


def _copied(folder: Path) -> str:
    """A copy of HAProxy's program with our pages; it finds its libraries beside itself."""
    program, copy = Path(_binary()), folder / "haproxy-json"
    copy.unlink(missing_ok=True)  # one that runs cannot be written to
    copy.write_bytes(_with_errors_in_json(program.read_bytes()))
    copy.chmod(0o700)
    (folder / "lib").unlink(missing_ok=True)
    (folder / "lib").symlink_to(program.parent / "lib")
    return str(copy)


def _with_errors_in_json(program: bytes) -> bytes:
    """The same program with other pages, each of the same length: spaces in a header make up for what is shorter."""

    def ours(page: re.Match[bytes]) -> bytes:
        status, reason = int(page[1]), page[2].decode()
        reply = _reply(status, *_ERRORS.get(status, (reason, reason)))
        spaces = len(page[0]) - len(reply)
        return page[0] if spaces < 0 else reply.replace(b"Type: ", b"Type: " + b" " * spaces)

    return _PAGE.sub(ours, program)


def _binary() -> str:
    if program := haproxy_program():
        return program
    raise UserError("HAProxy is missing: install ray[serve] again, which brings it")
