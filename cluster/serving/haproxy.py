"""HAProxy as Serve runs it, with additions for which Ray has no setting: local statistics, limits, errors in JSON.

At every change, Ray writes the configuration and starts HAProxy. A script of ours takes the place of HAProxy's program:
it edits the configuration, then starts a copy of the real program. The copy is changed too: HAProxy answers input that
is not HTTP with error pages from inside its program, whatever the configuration says, and in the copy these are JSON.
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
MOST_BYTES = 16 * 2**20  # a body with a larger Content-Length is not waited for: the front refuses it by its header
COMMAND_S = 2.0  # the time limit of a command to HAProxy
SILENT_S = 60  # how long a client may fail to send or to receive

_STARTING = "starting"  # a file with this name exists in the folder until the server is ready
_STOPPING = "stopping"  # a file with this name exists in the folder once the server stops
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
# Each backend gets two more with the same servers and reserved connections: one for clients with few requests, one for
# questions about the server. Requests whose body has not arrived cannot use them, as they would occupy a connection.
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
    408: ("Request Timeout", f"the request was not complete after {REQUEST_S} seconds"),
    413: ("Content Too Large", "the request is longer than is allowed"),
    429: ("Too Many Requests", "too many requests at once"),
    500: ("Internal Server Error", "the proxy before the front failed"),
    501: ("Not Implemented", "the request asks for something that is not supported"),
    502: ("Bad Gateway", "the front ended before it had answered"),
    503: ("Service Unavailable", "there are too many requests now, or a front has just ended: try again later"),
    504: ("Gateway Timeout", "the front did not answer"),
}
_REFUSALS = {  # the reasons for which HAProxy itself answers 503
    "crowded": "there are too many requests now: try again later",
    "empty": "no front is running now: another one starts",
    _STARTING: "this server starts: try again when it is ready",
    _STOPPING: "this server stops: it takes no more requests",
}


def write_script(folder: Path, ports: Collection[str]) -> str:
    """Write the script that Ray runs in HAProxy's place, and return its path. It binds `ports` to 127.0.0.1 only."""
    for status, (reason, sentence) in _ERRORS.items():
        (folder / f"{status}.http").write_bytes(_reply(status, reason, sentence))
    for reason, sentence in _REFUSALS.items():
        (folder / f"{reason}.json").write_text(_json(sentence))
    (folder / "404.json").write_text(_json("there is no such path: GET /-/routes lists all paths"))
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
    script.write_text(
        _SCRIPT.format(
            folder=shlex.quote(str(folder)),
            binary=shlex.quote(_copied(folder)),
            starting=_STARTING,
            stopping=_STOPPING,
        )
    )
    script.chmod(0o700)
    return str(script)


def _added(lines: Iterable[str]) -> str:
    """Lines to be added, in the form that sed expects."""
    return "\\\n".join(f"    {line}" for line in lines)


def ready(folder: Path) -> None:
    """Let HAProxy use Serve's own proxy for applications of which it knows no replica.

    Until then it answers 503, because Serve's proxy holds requests until there is a replica, longer than clients wait.
    """
    (folder / _STARTING).unlink(missing_ok=True)
    _command(folder, "enable")


def stopping(folder: Path) -> None:
    """Make HAProxy answer 503 for applications without a front: now, and with its next configuration.

    Without this it answers 404 itself, or forwards to Serve's own proxy, which answers 404 for an application that is
    being deleted.
    """
    (folder / _STOPPING).touch()
    _command(folder, "disable")


def _command(folder: Path, action: str) -> None:
    """Let the running HAProxy enable or disable the servers by which it reaches Serve's own proxy.

    Ray keeps the files of each node's HAProxy in a subfolder of the configured folder.
    """
    for config in folder.rglob("haproxy.cfg"):
        commands = ";".join(f"{action} server {server}" for server in _backups(config))
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as haproxy:  # HAProxy may not be running
            haproxy.settimeout(COMMAND_S)
            haproxy.connect(str(config.with_name("admin.sock")))
            haproxy.sendall(commands.encode() + b"\n")
            haproxy.recv(1)  # the commands are done


def _backups(config: Path) -> list[str]:
    """The servers by which HAProxy reaches Serve's own proxy."""
    servers, backend = [], ""
    for line in config.read_text().splitlines():
        match line.split():
            case ["backend", backend]:
                pass
            case ["server", server, *_, "backup"] | ["server", server, *_, "backup", "disabled"]:
                servers.append(f"{backend}/{server}")
    return servers


def _json(sentence: str) -> str:
    return json.dumps({"error": sentence})


def _reply(status: int, reason: str, sentence: str) -> bytes:
    body = _json(sentence)
    # After a 503 the client tries again, on the same connection.
    end = "" if status == 503 else "Connection: close\r\n"
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{end}"
    return f"HTTP/1.1 {status} {reason}\r\n{headers}\r\n{body}".encode()


def _copied(folder: Path) -> str:
    """Write a copy of HAProxy's program with our error pages. It finds its libraries beside itself."""
    if not (original := haproxy_program()):
        raise UserError("HAProxy is missing: reinstall ray[serve], which contains it")
    program, copy = Path(original), folder / "haproxy-json"
    copy.unlink(missing_ok=True)  # a running program cannot be written to
    copy.write_bytes(_with_errors_in_json(program.read_bytes()))
    copy.chmod(0o700)
    (folder / "lib").unlink(missing_ok=True)
    (folder / "lib").symlink_to(program.parent / "lib")
    return str(copy)


def _with_errors_in_json(program: bytes) -> bytes:
    """The program with our error pages in place of its own. Spaces in a header keep each page's length."""

    def as_json(page: re.Match[bytes]) -> bytes:
        status, reason = int(page[1]), page[2].decode()
        reply = _reply(status, *_ERRORS.get(status, (reason, reason)))
        spaces = len(page[0]) - len(reply)
        return page[0] if spaces < 0 else reply.replace(b"Type: ", b"Type: " + b" " * spaces)

    return _PAGE.sub(as_json, program)
