"""HAProxy as Serve runs it, with additions for which Ray has no setting: local statistics, limits, errors in JSON.

At every change, Ray writes the configuration and starts HAProxy. A script of ours takes the place of HAProxy's program:
it edits the configuration, then starts the real program. Only input that is not HTTP gets HAProxy's own error pages,
which no configuration replaces.
"""

import contextlib
import json
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

from isobatch.deployments.front.headers import DEADLINE_HEADER, KERNEL_FILE, LONGEST_MS, OPEN_PATHS, trusted_proxies
from isobatch.deployments.front.proxy import (
    CUT_MS,
    FEW,
    FEW_LONG,
    HANGS_MS,
    LONG,
    LOOPBACK,
    QUESTIONS,
    QUESTIONS_MS,
    QUEUED,
    QUEUED_MS,
    REQUEST_S,
    RETRY_S,
    SLO_MAP,
    asks_little,
    haproxy_reply,
    of_clients,
    too_slow,
)
from isobatch.deployments.ray_settings import haproxy_program
from isobatch.profiles.errors import UserError

MAX_CONNECTIONS = 8192  # of all clients
MOST_BYTES = 16 * 2**20  # a body with a larger Content-Length is not waited for: the front refuses it by its header
HURRIED_S = 2  # the time for the first 16 KiB of a body while more than half of all connections are taken
SILENT_S = 15  # how long a client may fail to send or to receive
ANSWERING = "/predict /classify /score /rerank"  # the ends of paths whose deadline is the SLO, or in a header
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE")  # for others uvicorn has no sentence in JSON

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
    awk -f {folder}/near.awk "$word" > {folder}/near.cfg
    cat {folder}/near.cfg > "$word"
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
export ISOBATCH_KERNEL="$(cat {kernel_file} 2>/dev/null)"  # of this machine, where another one may write this file
exec {binary} "$@"
"""
_EDITS = r"""s/^( *bind +)[*]?:({ports})$/\1127.0.0.1:\2/
/^ *errorfile /d
/^defaults$/a\
    timeout check {hangs_ms}\
{errorfiles}
s#^( *http-request return status 404) .*#\1 content-type application/json file {folder}/404.json#
s#(return status 50. content-type) text/plain string "([^"]*)"#\1 application/json string '{{"error": "\2"}}'#
/^frontend http_frontend$/a\
    # isobatch: a line in a log for each request would take longer than its refusal\
    no log\
    timeout http-request {request_s}s\
    timeout client {silent_s}s\
{clients}\
    {answer} 405 {json}/405.json if !{{ method {methods} }}\
    http-request set-header X-Request-Start t=%[date(0,us)];%[env(ISOBATCH_KERNEL)]\
    # isobatch: Serve would compute on for clients that send this and disconnect\
    http-request del-header X-Request-Disconnect-Disabled\
    acl large req.hdr_val(content-length) gt {most_bytes}\
    http-request wait-for-body time {hurried_s}s if !large {{ fe_conn gt {half} }}\
    http-request wait-for-body time {request_s}s if !large\
    http-request set-var(txn.came) req.body_len if !METH_GET\
    acl unfinished req.body_size,sub(txn.came) gt 0\
    acl unfinished req.hdr(transfer-encoding) -m found\
    {answer} 503 {json}/slow.json if unfinished {too_slow}\
    http-response return status 408 {json}/408.json if {{ status 408 }}\
    acl says_when res.hdr(retry-after) -m found\
    http-after-response set-header Retry-After %[rand({retry_s}),add(1)] if {{ status 503 }} !says_when
s/^ *use_backend ([^ ]+) if is_\1$/    use_backend \1:{questions} if is_\1 METH_GET !{{ req.body_len gt 0 }}\
    use_backend \1:{few_long} if is_\1 unfinished {asks_little}\
    use_backend \1:{long} if is_\1 unfinished\
    use_backend \1:{few} if is_\1 {asks_little}\n&/
/^ *http-reuse/a\
    timeout queue {queued_ms}\
{deadlines}\
    {answer} 503 {json}/empty.json if {{ nbsrv eq 0 }}\
    {answer} 503 {json}/crowded.json if {{ avg_queue gt {queued} }} {{ sc0_http_req_rate gt {queued} }}
"""
# Fronts of other nodes come last: their own HAProxy fills them, and only theirs learns of their limits at once.
_NEAR = f"""/^ *server / && !/ backup$/ && $3 !~ /^({"|".join(LOOPBACK)}):/ {{ far = far $0 "\\n"; next }}
!/^ *server / {{ printf "%s", far; far = "" }}
{{ print }}
END {{ printf "%s", far }}
"""
# Each backend gets more with the same servers and reserved connections: for clients with few requests, for requests
# whose body has not arrived completely, and for questions about the server.
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
{deadlines}
  print "    {answer} 503 {json}/empty.json if {{ nbsrv eq 0 }}"
  printf "%s", servers[of]
}}
END {{
  for (each in servers) {{
{backends}
  }}
}}
"""
_BUSY = "there are too many requests now, or a front has just ended: try again later"
_LATE = f"the request was not complete after {REQUEST_S} seconds, or came more slowly than others"
_ERRORS = {
    400: ("Bad Request", "this is no HTTP request, or its headers are longer than is allowed"),
    403: ("Forbidden", "this is not allowed"),
    408: ("Request Timeout", _LATE),
    413: ("Content Too Large", "the request is longer than is allowed"),
    429: ("Too Many Requests", "too many requests at once"),
    500: ("Internal Server Error", "the proxy before the front failed"),
    501: ("Not Implemented", "the request asks for something that is not supported"),
    502: ("Bad Gateway", "the front ended before it had answered"),
    503: ("Service Unavailable", _BUSY),
}
_NO_ANSWER = (503, "Service Unavailable", "the front did not answer before the deadline: try again later")
_SENTENCES = {  # of HAProxy's own answers, by their files
    "404": "there is no such path: GET /-/routes lists all paths",
    "405": f"this method is not known here: there are {', '.join(METHODS)}",
    "408": _LATE,
    "slow": "other requests of this client come too slowly: try again later",
    "crowded": "there are too many requests now: try again later",
    "empty": "no front is running now: another one starts",
    _STARTING: "this server starts: try again when it is ready",
    _STOPPING: "this server stops: it takes no more requests",
}


def write_script(folder: Path, ports: Collection[str], connections: int = MAX_CONNECTIONS) -> str:
    """Write the script that Ray runs in HAProxy's place, and return its path. It binds `ports` to 127.0.0.1 only."""
    for status, (reason, sentence) in _ERRORS.items():
        (folder / f"{status}.http").write_bytes(_reply(status, reason, sentence))
    (folder / "504.http").write_bytes(_reply(*_NO_ANSWER))
    for name, sentence in _SENTENCES.items():
        (folder / f"{name}.json").write_text(json.dumps({"error": sentence}))
    (folder / SLO_MAP).touch()
    words = {"answer": "http-request return status", "json": f"content-type application/json file {folder}"}
    deadlines = list(_deadlines(folder / SLO_MAP))
    health = f"METH_GET {{ path_end {' '.join(sorted(OPEN_PATHS))} }}"
    edits = _EDITS.format(
        **words,
        ports="|".join(ports),
        folder=folder,
        errorfiles=_added(f"errorfile {status} {folder}/{status}.http" for status in (*_ERRORS, 504)),
        deadlines=_added(deadlines),
        hangs_ms=HANGS_MS,
        request_s=REQUEST_S,
        hurried_s=HURRIED_S,
        half=connections // 2,
        most_bytes=MOST_BYTES,
        methods=" ".join(METHODS),
        silent_s=SILENT_S,
        clients=_added(of_clients(connections, health, trusted_proxies())),
        queued_ms=QUEUED_MS,
        queued=QUEUED,
        retry_s=RETRY_S,
        asks_little=asks_little(QUEUED),
        too_slow=too_slow(),
        few=FEW,
        few_long=FEW_LONG,
        long=LONG,
        questions=QUESTIONS,
    )
    (folder / "haproxy.sed").write_text(edits)
    (folder / "near.awk").write_text(_NEAR)
    waits = dict.fromkeys((FEW, FEW_LONG, LONG), QUEUED_MS) | {QUESTIONS: QUESTIONS_MS}
    backends = "\n".join(f'    backend(each, "{kind}", {waits_ms})' for kind, waits_ms in waits.items())
    printed = "\n".join(f'  print "    {line}"' for line in deadlines)
    (folder / "aside.awk").write_text(_ASIDE.format(**words, deadlines=printed, backends=backends))
    script = folder / "haproxy"
    (folder / _STARTING).touch()
    if not (program := haproxy_program()):
        raise UserError("HAProxy is missing: reinstall ray[serve], which contains it")
    paths = {"folder": shlex.quote(str(folder)), "binary": shlex.quote(program)}
    script.write_text(_SCRIPT.format(**paths, kernel_file=KERNEL_FILE, starting=_STARTING, stopping=_STOPPING))
    script.chmod(0o700)
    return str(script)


def _deadlines(slo_map: Path) -> Iterable[str]:
    """Rules that end a request soon after its deadline, in case that the front hangs and does not do so itself."""
    deadline_ms, longest_ms = f"req.hdr_val({DEADLINE_HEADER})", int(LONGEST_MS)
    slo_ms = f"be_name,map_str_int({slo_map},{longest_ms})"
    infers = f"{{ path_end {ANSWERING} /infer }} {{ {deadline_ms} 1:{longest_ms} }}"
    predicts = f"{{ path_end {ANSWERING} }} !{{ req.hdr({DEADLINE_HEADER}) -m found }}"
    for time_ms, condition in ((deadline_ms, infers), (slo_ms, predicts)):
        yield f"http-request set-timeout server {time_ms},add({CUT_MS}) if {condition}"


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
        with contextlib.suppress(OSError):  # HAProxy may not be running
            haproxy_reply(config.with_name("admin.sock"), commands)


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


def _reply(status: int, reason: str, sentence: str) -> bytes:
    body = json.dumps({"error": sentence})
    # After a 503 the client tries again, on the same connection.
    end = "" if status == 503 else "Connection: close\r\n"
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{end}"
    return f"HTTP/1.1 {status} {reason}\r\n{headers}\r\n{body}".encode()
