"""`isobatch load` as a user types it: its requests, its output, and its exit code."""

import asyncio
import errno
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from isobatch.cluster import cli
from isobatch.cluster.load import report
from isobatch.cluster.load.generator import BROKEN, LoadGenerator, LoadRecord
from isobatch.cluster.load.report import is_failure, summary
from isobatch.cluster.load.request_bodies import accepted_at, predicts_at, promised_ms
from isobatch.profiles.errors import UserError
from tests.helpers.commands import ran
from tests.helpers.grpc_client import grpc_port

WRITTEN = {"choices": [{"text": "ab", "exit_blocks": [1, 5]}]}


class Served:
    """A server that accepts inputs of one kind and records them."""

    def __init__(self, datatype: str, key: str | None = None, shape: tuple[int, ...] = (), prefix: str = "") -> None:
        self.seen: list[Any] = []
        self.ready, self.decodes = True, False
        self.slo_ms: float | None = None
        self.deadlines: set[str] = set()
        self.of_every_path: dict[str, Any] | None = None
        self.paths: list[str] = []  # of the GET requests
        self.posts = 0  # that were answered
        self.holds_above, self.held = inf, Event()  # longer texts are answered once it is set
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                metadata = {"inputs": [{"name": "inputs", "datatype": datatype, "shape": [-1, *shape]}]}
                known: dict[str, Any] = {"/stats": {"slo_ms": served.slo_ms}} if served.slo_ms else {}
                known |= {"/stats": {"tokens_per_s": 0.0}} if served.decodes else {"/v2/models/m": metadata}
                known["/readyz"] = {"status": "ready", "model": "m"}
                path = self.path.removeprefix(prefix)
                served.paths.append(self.path)
                if served.of_every_path:
                    known = {path: served.of_every_path}
                self._reply((200 if served.ready else 503) if path in known else 404, known.get(path, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if served.decodes:
                    self._reply(
                        200 if self.path == "/v1/completions" else 404,
                        f"data: {json.dumps(WRITTEN)}\n\ndata: [DONE]\n\n",
                    )
                    return
                (one,) = body["inputs"]
                served.seen.append(one)
                if len(one) > served.holds_above:
                    served.held.wait()
                served.deadlines.add(self.headers["X-Deadline-Ms"])
                right = self.path == f"{prefix}/predict" and isinstance(one, str) == (datatype == "BYTES")
                right = right and (min(shape, default=0) < 1 or np.shape(one) == shape)
                self._reply(200 if right else 422, {"outputs": []})

            def _reply(self, status: int, content: Any) -> None:
                if key and self.headers["X-API-Key"] != key:
                    status, content = 401, {"error": "no key"}
                body = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                served.posts += self.command == "POST"

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def serve() -> Iterator[Callable[[str], Served]]:
    running: list[Served] = []

    def start(*accepts: Any, **more: Any) -> Served:
        running.append(Served(*accepts, **more))
        return running[-1]

    yield start
    for each in running:
        each.server.shutdown()
        each.server.server_close()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    def typed(*arguments: object, draws: bool = False) -> int:
        options = ["--clients", 1, "--seconds", 0.1, "--out", tmp_path / "load.json"]
        monkeypatch.setattr(sys, "argv", ["isobatch", "load", *map(str, (*arguments, *options))])
        if not draws:  # a picture takes longer than all else
            monkeypatch.setattr(report, "draw", lambda *_: None)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0)

    return typed


Load, Serve = Callable[..., int], Callable[..., Served]


@pytest.mark.parametrize(("datatype", "kind"), [("BYTES", str), ("FP32", list)])
def test_a_server_is_sent_inputs_of_the_kind_that_it_accepts(
    serve: Serve, load: Load, capsys: pytest.CaptureFixture[str], datatype: str, kind: type
) -> None:
    served = serve(datatype)
    assert load(served.url) == 0  # without /predict
    assert served.seen
    assert {type(each) for each in served.seen} == {kind}
    assert f"takes {'texts' if kind is str else 'images'}: sending" in capsys.readouterr().out


def test_the_address_of_one_application_of_several_is_enough(serve: Serve, load: Load) -> None:
    served = serve("BYTES", prefix="/reviews")
    served.slo_ms = 100.0
    assert load(f"{served.url}/reviews") == 0
    assert {type(each) for each in served.seen} == {str}


def test_one_application_of_several_that_asks_for_a_key_says_so(
    serve: Serve, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(f"{serve('BYTES', key='secret', prefix='/reviews').url}/reviews") == 2
    assert "/reviews asks for a key: --api-key-variable" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("path", "requests"), [("/predict", []), ("/v1/ask", ["/v1/ask/stats"])])
def test_a_server_that_answers_every_path_in_json_is_no_application(
    serve: Serve, path: str, requests: list[str]
) -> None:
    served = serve("BYTES")
    served.of_every_path = {"message": "welcome"}
    assert predicts_at(f"{served.url}{path}", {}) == f"{served.url}{path}"
    assert served.paths == requests


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ((8, 8), "sending 256 of the demo's digits;"),
        ((-1, -1), "sending 256 of the demo's digits (the server does not name the size of images);"),
        ((32, 32, 3), "sending 163 made-up ones of 32 x 32 x 3;"),
        ((224, 224, 3), "sending 4 made-up ones of 224 x 224 x 3;"),
    ],
)
def test_made_up_images_have_the_size_that_the_server_names(
    serve: Serve, load: Load, capsys: pytest.CaptureFixture[str], shape: tuple[int, ...], what: str
) -> None:
    served = serve("FP32", shape=shape)
    assert load(served.url) == 0
    assert what in capsys.readouterr().out.replace("\n", " ")
    assert {np.shape(each) for each in served.seen} == {(8, 8) if -1 in shape else shape}


def test_own_inputs_are_sent(serve: Serve, load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve("BYTES")
    (tmp_path / "reviews.csv").write_text("text,label\ngood,1\nbad,0\n")
    assert load(f"{served.url}/predict", "--data", tmp_path / "reviews.csv") == 0
    assert set(served.seen) == {"good", "bad"}
    assert "reviews.csv: text from 'text', label from 'label'" in capsys.readouterr().out
    (tmp_path / "reviews.csv").write_text("text,verdict\ngood,1\n")
    assert load(served.url, "--data", tmp_path / "reviews.csv", "--label-column", "verdict") == 0
    assert "label from 'verdict'" in capsys.readouterr().out


def test_a_full_disk_is_named_by_the_picture(
    serve: Serve, load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "draw", full)
    assert load(serve("BYTES").url, draws=True) == 2
    assert "load.png: No space left on device: free some of the disk" in capsys.readouterr().err


def test_the_servers_slo_holds_if_none_is_given(serve: Serve, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve("BYTES")
    for slo_ms, options, within in ((None, (), "1000"), (250.0, (), "250"), (250.0, ("--slo-ms", 70), "70")):
        served.slo_ms, served.deadlines = slo_ms, set()
        assert load(served.url, *options) == 0
        assert (f"within {within} ms" in capsys.readouterr().out, served.deadlines) == (True, {within})
    served.slo_ms, served.deadlines = 36e5, set()
    assert (load(served.url), served.deadlines) == (0, {"3600000"})


def test_answers_are_waited_for_as_long_as_they_may_take(
    serve: Serve, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadGenerator, "patience_s", 0.0)
    assert load(serve("BYTES").url, "--slo-ms", 30_000) == 0


def test_the_key_is_sent_to_a_server_that_needs_one(
    serve: Serve, load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve("BYTES", "secret")
    assert load(served.url) == 2
    assert "asks for a key: --api-key-variable names the variable" in capsys.readouterr().err.replace("\n", " ")
    monkeypatch.delenv("MY_KEY", raising=False)
    assert load(served.url, "--api-key-variable", "MY_KEY") == 2
    assert "--api-key-variable MY_KEY: that environment variable is not set" in capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", "secret\n")
    assert load(served.url, "--api-key-variable", "MY_KEY") == 0
    assert served.seen


def test_a_key_with_other_letters_is_sent_as_the_server_reads_it(
    serve: Serve, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "schl\u00fcssel")
    assert load(serve("BYTES", "schl\u00fcssel".encode().decode("latin-1")).url, "--api-key-variable", "MY_KEY") == 0


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The figures of a load that Ctrl-C ends once the server has answered six requests."""

    def typed(served: Served, *words: str) -> dict[str, Any]:
        async def cut_off(work: Coroutine[Any, Any, LoadRecord]) -> None:
            sending = asyncio.create_task(work)
            while served.posts < 6:
                await asyncio.sleep(0.01)
            sending.cancel()
            await asyncio.wait([sending])
            raise KeyboardInterrupt

        monkeypatch.setattr("isobatch.cluster.commands.load.run_noting_polls", lambda work: asyncio.run(cut_off(work)))
        out = tmp_path / "load.json"
        monkeypatch.setattr(sys, "argv", ["isobatch", "load", *words, "--seconds", "60", "--out", str(out)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 130
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures

    return typed


@pytest.mark.parametrize("arriving", [("--clients", "1"), ("--rate", "100")])
@pytest.mark.parametrize("decodes", [False, True])
def test_ctrl_c_shows_what_was_measured_until_then(
    serve: Serve, interrupted: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    arriving: tuple[str, str], decodes: bool,
) -> None:  # fmt: skip
    served, prompts = serve("BYTES"), tmp_path / "prompts.txt"
    served.decodes = decodes
    prompts.write_text("1+1=\n")
    sent, path = (("--prompts", str(prompts)), "/v1/completions") if decodes else ((), "")
    figures = interrupted(served, served.url + path, *arriving, *sent)
    assert figures["outcomes"] == {"answered": figures["requests"]}
    assert figures["requests"] > 2
    assert figures["seconds"] < 60
    assert "interrupted: these are the figures of the requests that had ended" in capsys.readouterr().out


def test_ctrl_c_counts_the_tokens_of_the_requests_that_had_ended(
    serve: Serve, interrupted: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    served, lengths = serve("BYTES"), tmp_path / "lengths.txt"
    served.holds_above = 100
    lengths.write_text("10\n1000\n")
    figures = interrupted(served, f"{served.url}/predict", "--rate", "100", "--lengths", str(lengths))
    served.held.set()
    assert figures["requests"] > 2
    assert figures["offered_tokens_per_s"] == pytest.approx(10 * figures["offered_per_s"])


def test_other_statuses_are_failures(serve: Serve, load: Load, tmp_path: Path) -> None:
    served = serve("BYTES")
    (tmp_path / "bodies.jsonl").write_text('{"inputs": [3]}\n')
    assert load(served.url, "--bodies", tmp_path / "bodies.jsonl", draws=True) == 1
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "options", "state", "sentence"),
    [
        ("", ["--prompts", "missing.txt"], {}, "cannot read missing.txt: No such file or directory: --prompts is a f"),
        ("/v1/predict", [], {}, "takes texts or images (status 404): --bodies FILE sends"),
        ("", [], {"decodes": True}, "writes texts: --prompts FILE"),
        ("", ["--data", "reviews.csv"], {"ready": False}, "is not ready (status 503): wait until 'isobatch serve' say"),
        ("", ["--slo-ms", "-5"], {}, "--slo-ms -5 must be above 0"),
    ],
)
def test_what_cannot_be_sent_is_one_sentence(
    serve: Serve, load: Load, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    path: str, options: list[str], state: dict[str, bool], sentence: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reviews.csv").write_text("text\ngood\n")
    served = serve("BYTES")
    vars(served).update(state)
    assert load(f"{served.url}{path}", *options) == 2
    assert sentence in capsys.readouterr().err.replace("\n", " ")


WRONG_ADDRESSES = (
    "localhost:8000", "127.0.0.1:8000", "reviews.csv", "http://", "http://127.0.0.1:1", "http://127.0.0.1:x",
    "http://127.0.0.1:99999", "http://a..b:80",
)  # fmt: skip


@pytest.mark.parametrize("url", WRONG_ADDRESSES)
def test_a_wrong_address_is_reported(load: Load, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert load(url) == 2
    sentence = f"nobody answers at {url}" if url.endswith(":1") else f"'{url}' must look like http://HOST:PORT"
    assert sentence in capsys.readouterr().err


def test_an_address_with_a_blank_is_reported() -> None:
    for url in ("http://127.0.0.1:1/my reviews", "http://127.0.0.1:1/b\u00fccher"):
        with pytest.raises(UserError, match="has a blank or a letter that addresses do not have: write %20"):
            ran("status", url)


@pytest.mark.parametrize(
    ("status", "failed"), [([200, 503, 504], False), ([503], True), ([200, 500], True), ([200, BROKEN], True)]
)
def test_refusals_are_no_failure_beside_answers(status: list[int], failed: bool) -> None:
    times = np.arange(float(len(status)))
    record = LoadRecord(times, times, times, times + 1, np.array(status), times)
    assert is_failure(summary(record, 10).outcomes) is failed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--rate", "1", "--out", "load.png"), "--out load.png is for the figures, as JSON"),
        (("--rate", "1", "--out", "."), "cannot write .: it is a directory"),
        (("--seconds", "1"), "give either --clients .closed loop., or --rate"),
        (("--rate", "1", "--trace-each-s", "60"), "--trace-each-s is for --trace"),
        (("--trace", "t.csv", "--arrivals", "uniform"), "--arrivals is not for --trace, which has its own arrivals"),
        (("--clients", "1", "--seed", "5"), "--seed is for --rate and --trace, not for --clients"),
        (("--rate", "1", "--text-column", "text"), "--text-column is for --data: name a file"),
        (("--rate", "1", "--max-rows", "5"), "--max-rows is for --data: name a file"),
        (("--rate", "1", "--max-tokens", "5"), "--max-tokens is for --prompts: name their file"),
    ],
)
def test_wrong_options_are_refused_before_the_server_is_asked(options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ran("load", "http://127.0.0.1:1", *options)


def test_the_port_of_grpc_is_reported() -> None:
    with grpc_port() as url:
        assert promised_ms(f"{url}/predict", {}) is None
        with pytest.raises(UserError, match=rf"the server at {url}/readyz does not speak HTTP/1\.1: is that the port"):
            accepted_at(f"{url}/predict", {})


def test_a_model_whose_name_has_blanks_and_letters_of_any_language_is_known(serve: Serve) -> None:
    served = serve("BYTES")
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [-1]}
    served.of_every_path = {"model": "mein Netz für 日本", "inputs": [tensor]}
    assert accepted_at(f"{served.url}/predict", {}).model == "mein Netz für 日本"
    assert served.paths[-1] == "/v2/models/mein%20Netz%20f%C3%BCr%20%E6%97%A5%E6%9C%AC"
