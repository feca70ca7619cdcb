"""Cases by the hundred in `make test`, by the hundred thousand in `make fuzz`: nobody's bytes stop what listens here.

No case is a 5xx but 503 and 504, takes over a second, makes memory grow or spoils what an honest client is told.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cluster.serving.serve_file import serve_file
from deployments.models.ramps import read_rules
from optimizer.plan import read_plan
from profiles import files
from profiles.errors import UserError
from tests.fuzz import cases
from tests.fuzz.conftest import MOST_GROWTH_MIB
from tests.fuzz.served import Served, rss_mib

ROOT = Path(__file__).parents[2]
ALL = int(os.environ.get("ISOBATCH_FUZZ", "600"))  # cases of all kinds together
AT_ONCE = 500  # hypothesis remembers all cases of one run: several runs, or its memory would look like ours
# A second on a core of one's own: on a busy machine, as many times that as there are others for each core.
WITHIN_S = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
FINE = {200, 400, 401, 404, 405, 408, 413, 415, 422, 503, 504}
CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}


def attack(
    counts: Counter[tuple[str, str]], kind: str, share: float, case: st.SearchStrategy[Any], act: Callable[[Any], str]
) -> None:
    """So many cases; what came of each is counted. Memory is looked at when the first tenth is done."""
    left, before_mib = max(1, round(share * ALL)), None
    rounds = -(-left // AT_ONCE)
    for number in range(rounds):
        most = min(AT_ONCE, left)
        left -= most

        @seed(number if ALL > 10_000 else time.time_ns())
        @settings(
            max_examples=most,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
        )
        @given(case)
        def one(sent: Any) -> None:
            counts[kind, act(sent)] += 1

        one()
        if before_mib is None and number >= rounds // 10:
            before_mib = rss_mib()
    assert before_mib is not None
    grown_mib = rss_mib() - before_mib
    counts["memory", f"{kind}_grown_mib"] = round(grown_mib)
    assert grown_mib < MOST_GROWTH_MIB


def judged(reply: tuple[int, dict[bytes, bytes], bytes]) -> str:
    status, _, content = reply
    assert status in FINE, (status, content[:500])
    if status != 200:
        assert len(content) <= 1024, content[:2000]
        assert list(json.loads(content)) == ["error"]
    return str(status)


def test_predict(served: Served, counts: Counter[tuple[str, str]]) -> None:
    def act(sent: tuple[bytes, dict[str, str]]) -> str:
        return judged(served.run(served.ask("POST", "/predict", sent[1], sent[0]), WITHIN_S))

    attack(counts, "predict", 0.2, st.tuples(cases.predict, cases.headers), act)


def test_v2_json(served: Served, counts: Counter[tuple[str, str]]) -> None:
    def act(sent: tuple[bytes, dict[str, str]]) -> str:
        reply = served.run(served.ask("POST", "/v2/models/toy/infer", sent[1], sent[0]), WITHIN_S)
        if reply[0] == 200 and b"inference-header-content-length" not in reply[1]:
            json.loads(reply[2], parse_constant=pytest.fail)
        return judged(reply)

    attack(counts, "v2_json", 0.25, st.tuples(cases.v2_json, cases.headers), act)


def test_v2_binary(served: Served, counts: Counter[tuple[str, str]]) -> None:
    def act(sent: tuple[bytes, str]) -> str:
        told = {"inference-header-content-length": sent[1]}
        return judged(served.run(served.ask("POST", "/v2/models/toy/infer", told, sent[0]), WITHIN_S))

    attack(counts, "v2_binary", 0.15, cases.v2_binary(), act)


def test_raw_http(served: Served, counts: Counter[tuple[str, str]]) -> None:
    def act(sent: bytes) -> str:
        came = served.run(served.raw(served.http_port, sent), WITHIN_S)
        status = came.split(b" ", 2)[1].decode() if came.startswith(b"HTTP/") else "nothing"
        assert status == "nothing" or int(status) < 500 or int(status) in (503, 504), came[:500]
        return status

    attack(counts, "raw_http", 0.05, cases.http, act)


def test_grpc(served: Served, counts: Counter[tuple[str, str]]) -> None:
    def act(sent: tuple[str, bytes]) -> str:
        code, details = served.run(served.unary(*sent), WITHIN_S)
        assert code in CODES, (code, details)
        assert len(details) <= 1024
        return str(code)

    methods = st.sampled_from(["ModelInfer"] * 6 + ["ModelReady", "ServerMetadata", "ModelStatistics", "ModelConfig"])
    attack(counts, "grpc", 0.15, st.tuples(methods, cases.grpc), act)


def test_grpc_streams(served: Served, counts: Counter[tuple[str, str]]) -> None:
    """Each message is answered, whatever came before it."""

    def act(sent: list[bytes]) -> str:
        replies = served.run(served.stream([*sent, cases._GRPC[0]]), WITHIN_S)
        assert len(replies) == len(sent) + 1
        assert all(len(reply.error_message) <= 1024 for reply in replies)
        assert replies[-1].infer_response.outputs, replies[-1].error_message
        return "answered"

    attack(counts, "grpc_streams", 0.05, st.lists(cases.grpc, min_size=1, max_size=4), act)


@pytest.mark.parametrize("which", ["desk", "exchange"])
def test_replica_sockets(served: Served, counts: Counter[tuple[str, str]], which: str) -> None:
    from deployments.transport.exchange import Drop, Fetch
    from deployments.transport.frames import frame
    from deployments.transport.replica_connection import EndIfStuck, Key

    said = [frame(each) for each in (Key("0" * 32), EndIfStuck(5.0), Fetch([("k", [1, 2])]), Drop(["k"]))]
    port = served.desk_port if which == "desk" else served.exchange_port

    def act(sent: bytes) -> str:
        served.run(served.raw(port, sent), WITHIN_S)
        assert not served.desk.callers
        return "no order taken"

    sent = st.one_of(st.sampled_from(said).flatmap(cases.damaged), st.binary(max_size=40))
    attack(counts, which, 0.02, sent, act)


def _serve_file(path: Path) -> object:
    return serve_file(path, {})


FILES: dict[str, tuple[Path, Callable[[Path], object]]] = {
    "serve.yaml": (ROOT / "cluster" / "demo.yaml", _serve_file),
    "plan": (ROOT / "cluster" / "demo" / "plan.json", read_plan),
    "profile": (ROOT / "cluster" / "demo" / "profile.json", files.load),
}


@pytest.mark.parametrize("kind", FILES)
def test_files(tmp_path: Path, counts: Counter[tuple[str, str]], kind: str) -> None:
    read_file(tmp_path, counts, kind, *FILES[kind])


def test_exit_rules(tmp_path: Path, counts: Counter[tuple[str, str]]) -> None:
    rules = {"version": 1, "ramps": [{"block": 1, "threshold": 0.4, "temperature": 1.0}], "notes": {"data": "x"}}
    (tmp_path / "good.json").write_text(json.dumps(rules))
    read_file(tmp_path, counts, "exits", tmp_path / "good.json", read_rules)


def read_file(
    folder: Path, counts: Counter[tuple[str, str]], kind: str, valid: Path, read: Callable[[Path], object]
) -> None:
    text = valid.read_bytes()
    value = yaml.safe_load(text)
    path = folder / f"case{valid.suffix}"

    def act(sent: bytes) -> str:
        path.write_bytes(sent)
        began_s, refusal = time.perf_counter(), ""
        try:
            read(path)
        except UserError as error:
            refusal = str(error)
        assert time.perf_counter() - began_s < WITHIN_S
        assert "\n" not in refusal
        return "refused" if refusal else "read"

    attack(counts, kind, 0.02, st.one_of(cases.changed(value).map(cases.as_json), cases.damaged(text)), act)


def test_the_honest_client_was_right_and_was_not_kept_waiting(served: Served) -> None:
    assert served.honest
    assert not served.wrong
    assert served.worst_s < WITHIN_S
