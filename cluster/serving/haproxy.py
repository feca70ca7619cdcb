"""HAProxy as Serve runs it, with additions for which Ray has no setting: local statistics, limits, errors in JSON.

At every change, Ray writes the configuration and starts HAProxy. A script of ours takes the place of HAProxy's program:
it edits the configuration (haproxy_edits.py), then becomes the real program. Only bytes that are not HTTP get HAProxy's
own error pages, which no configuration replaces.
"""

import contextlib
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from shutil import copyfile

from isobatch.cluster.serving import haproxy_edits
from isobatch.cluster.serving.haproxy_edits import EDITED, EDITS, HELD, READY, STARTING, STOPPING, Edits
from isobatch.deployments.deployer.steps import NETWORK
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
    TOO_SLOW,
    asks_little,
    haproxy_reply,
    of_clients,
)
from isobatch.deployments.ray_settings import haproxy_program
from isobatch.profiles.errors import UserError

MAX_CONNECTIONS = 8192  # of all clients
# The longest path of the folder for temporary files. A path of HAProxy's sockets has at most 97 bytes, of which Ray and
# isobatch need 86 below this folder.
SHORT = 11
# The same for Ray's own sockets, whose paths have at most 107 bytes, of which Ray needs 72.
SHORT_FOR_RAY = 35
PLAIN = re.compile(r"[\w/.+@:~-]+")  # a path that HAProxy reads as it is: blanks, quotes, # and $ are syntax
MOST_BYTES = 16 * 2**20  # a body with a larger Content-Length is not waited for: the front refuses it by its header
HURRIED_S = 2  # the time for the first 16 KiB of a body while more than half of all connections are taken
SILENT_S = 15  # how long a client may fail to send or to receive
HEALTH_WITHIN_S = 5  # the time for the front to answer a health check
HEALTH = f"METH_GET {{ path_end {' '.join(sorted(OPEN_PATHS))} }}"  # HAProxy's condition for a health check
ANSWERING = "/predict /classify /score /rerank"  # the ends of paths whose deadline is the SLO, or in a header
REQUEST_ID = "req.fhdr(x-request-id)"  # sent back with each answer, HAProxy's own too, so that clients and logs agree
LONGEST_ID = 200  # characters of an id that is sent back
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE")  # for others uvicorn has no sentence in JSON

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
    504: ("Service Unavailable", "the front did not answer before the deadline: try again later"),  # sent as 503
}
_WRONG = {  # sentences about wrong requests, by their files
    "404": "there is no such path: GET /-/routes lists all paths",
    "405": f"this method is not known here: there are {', '.join(METHODS)}",
    "408": _LATE,
}
_REFUSALS = {  # the same of refusals, which have status 503
    "503": "there are too many requests now, or a front has just ended: try again later",
    "slow": "other requests of this client come too slowly: try again later",
    "crowded": "there are too many requests now: try again later",
    READY: "no front is running now: another one starts",
    # HAProxy has this sentence until its next configuration, which may first come when the server stops.
    STARTING: "this server starts or stops: try again later",
    STOPPING: "this server stops: it takes no more requests",
}


def write_script(folder: Path, ports: Collection[str], connections: int = MAX_CONNECTIONS) -> str:
    """Write the script that Ray runs in HAProxy's place, and return its path. It binds `ports` to 127.0.0.1 only."""
    if not (program := haproxy_program()):
        raise UserError("HAProxy is missing: reinstall ray[serve], which contains it")
    for status, (reason, sentence) in _ERRORS.items():
        (folder / f"{status}.http").write_bytes(_reply(status, reason, sentence))
    for name, sentence in (_WRONG | _REFUSALS).items():
        after = "var(txn.after),regsub(server,invalid_request)" if name in _WRONG else "var(txn.after)"
        about = f"%[var(txn.before)]{json.dumps(sentence)}%[{after}]"  # as OpenAI has it, or a sentence alone
        (folder / f"{name}.json").write_text(f'{{"error": {about}}}')
    (folder / SLO_MAP).touch()
    (folder / STARTING).touch()
    edits, copied, script = _edits(program, folder, ports, connections), folder / "edits.py", folder / "haproxy"
    (folder / EDITS).write_text(json.dumps(edits._asdict()))
    copyfile(haproxy_edits.__file__, copied)
    script.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", str(copied)])} "$@"\n')
    script.chmod(0o700)
    return str(script)


def _edits(program: str, folder: Path, ports: Collection[str], connections: int) -> Edits:
    json_file, texts = f"content-type application/json lf-file {folder}", "if { path_end /completions }"
    opened, closed = '{"message": ', ', "type": "server_error", "param": null, "code": null}'
    answer, asks_much = "http-request return status", f"{{ sc0_http_req_rate gt {QUEUED} }}"
    no_front = f"{answer} 503 {json_file}/{READY}.json if {{ nbsrv eq 0 }}"
    crowded = f"{answer} 503 {json_file}/crowded.json if {{ avg_queue gt {QUEUED} }} {asks_much}"
    deadlines = list(_deadlines(folder / SLO_MAP))
    return Edits(
        program=program,
        kernel_file=str(KERNEL_FILE),
        slo_map=str(folder / SLO_MAP),
        ports=list(ports),
        near=LOOPBACK,
        defaults=[
            f"timeout check {HANGS_MS}",
            *(f"errorfile {status} {folder}/{status}.http" for status in _ERRORS),
            f"http-error status 503 {json_file}/503.json",
        ],
        frontend=[
            f"{EDITED}: a line in a log for each request would take longer than its refusal",
            "no log",
            f"timeout http-request {REQUEST_S}s",
            f"timeout client {SILENT_S}s",
            "# over HTTP/2 each connection, of which a client has a share, could have a hundred requests",
            "option disable-h2-upgrade",
            *of_clients(connections, HEALTH, trusted_proxies()),
            f"http-request set-var(txn.id) {REQUEST_ID} if {{ {REQUEST_ID} -m reg ^[[:print:]]{{1,{LONGEST_ID}}}$ }}",
            "# Serve would fail on an id that is not UTF-8",
            "http-request del-header X-Request-Id if !{ var(txn.id) -m found }",
            "http-after-response set-header X-Request-Id %[var(txn.id)] if { var(txn.id) -m found }",
            f"http-request set-var-fmt(txn.before) '{opened}' {texts}",
            f"http-request set-var-fmt(txn.after) '{closed}' {texts}",
            f"{answer} 405 {json_file}/405.json if !{{ method {' '.join(METHODS)} }}",
            "http-request set-var(txn.began) date(0,us)",
            "http-request set-header X-Request-Start t=%[var(txn.began)];%[env(ISOBATCH_KERNEL)]",
            "# Serve would compute on for clients that send this and disconnect",
            "http-request del-header X-Request-Disconnect-Disabled",
            f"acl large req.hdr_val(content-length) gt {MOST_BYTES}",
            "# req.hdr_val reads 32 bits, which a longer number exceeds",
            f"acl large req.hdr(content-length) -m len gt {len(str(MOST_BYTES))}",
            f"http-request wait-for-body time {HURRIED_S}s if !large {{ fe_conn gt {connections // 2} }}",
            f"http-request wait-for-body time {REQUEST_S}s if !large",
            "http-request set-header X-Request-Sent %[date(0,us),sub(txn.began)]",
            "http-request set-var(txn.came) req.body_len if !METH_GET",
            "acl unfinished req.body_size,sub(txn.came) gt 0",
            "acl unfinished req.hdr(transfer-encoding) -m found",
            f"{answer} 503 {json_file}/slow.json if unfinished {TOO_SLOW}",
            f"http-response return status 408 {json_file}/408.json if {{ status 408 }}",
            "acl says_when res.hdr(retry-after) -m found",
            f"http-after-response set-header Retry-After %[rand({RETRY_S}),add(1)] if {{ status 503 }} !says_when",
        ],
        backend=[f"timeout queue {QUEUED_MS}", *deadlines, no_front, crowded],
        spread=NETWORK,
        aside=["http-reuse always", *deadlines, no_front],
        further={
            QUESTIONS: ("METH_GET !{ req.body_len gt 0 }", QUESTIONS_MS, HELD),
            FEW_LONG: (f"unfinished {asks_little(QUEUED)}", QUEUED_MS, QUEUED),
            LONG: ("unfinished", QUEUED_MS, HELD),
            FEW: (asks_little(QUEUED), QUEUED_MS, QUEUED),
        },
    )


def _deadlines(slo_map: Path) -> Iterator[str]:
    """Rules that end a request soon after its deadline, because a front that hangs does not do so itself."""
    deadline_ms, longest_ms = f"req.hdr_val({DEADLINE_HEADER},1)", int(LONGEST_MS)  # of several the first, as the front
    slo_ms = f"be_name,map_str_int({slo_map},{longest_ms})"
    infers = f"{{ path_end {ANSWERING} /infer }} {{ {deadline_ms} 1:{longest_ms} }}"
    predicts = f"{{ path_end {ANSWERING} }} !{{ req.hdr({DEADLINE_HEADER}) -m found }}"
    for time_ms, condition in ((deadline_ms, infers), (slo_ms, predicts)):
        yield f"http-request set-timeout server {time_ms},add({CUT_MS}) if {condition}"
    # While no front runs, Serve's own proxy would hold a health check until one does.
    yield f"http-request set-timeout server {HEALTH_WITHIN_S}s if {HEALTH}"


def short_temporary() -> str:
    """The folder for temporary files, or /tmp if sockets or HAProxy cannot have its path. May set RAY_TMPDIR."""
    temporary, ray_folder = tempfile.gettempdir(), os.environ.get("RAY_TMPDIR", "")
    if len(os.fsencode(ray_folder)) > SHORT_FOR_RAY:
        raise UserError(f"RAY_TMPDIR is {ray_folder!r}: sockets need one of at most {SHORT_FOR_RAY} bytes")
    if not ray_folder and len(os.fsencode(temporary)) > SHORT_FOR_RAY:
        os.environ["RAY_TMPDIR"] = "/tmp"
    return temporary if len(os.fsencode(temporary)) <= SHORT and PLAIN.fullmatch(temporary) else "/tmp"


def ready(folder: Path) -> None:
    """Let HAProxy use Serve's own proxy for applications of which it knows no replica.

    Until then it answers 503, because Serve's proxy holds requests until there is a replica, longer than clients wait.
    """
    (folder / STARTING).unlink(missing_ok=True)
    _command(folder, "enable")


def stopping(folder: Path) -> None:
    """Make HAProxy answer 503 for applications without a front: now, and with its next configuration.

    Without this it answers 404 itself, or forwards to Serve's own proxy, which answers 404 for an application that is
    being deleted.
    """
    (folder / STOPPING).touch()
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
    body, status = json.dumps({"error": sentence}), min(status, 503)
    end = "" if status == 503 else "Connection: close\r\n"  # after a 503 the client tries again, on the same connection
    headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{end}"
    return f"HTTP/1.1 {status} {reason}\r\n{headers}\r\n{body}".encode()
