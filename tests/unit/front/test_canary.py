"""A canary: which requests it computes, what clients get, and when it is taken back."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from gzip import compress
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal
from fastapi.testclient import TestClient

from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.canary import PARKED, TIME_SHARE, Canary, Headers, NamedReply
from isobatch.deployments.front.driver import Driver
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.predict import Predict
from isobatch.deployments.front.service import Service
from isobatch.deployments.named import CanaryTerms
from tests.helpers.documented import TOY, DocumentedClient, with_document


class Other:
    """The front of the canary: it answers `label` for each input, or not in time."""

    def __init__(self, label: str = "7") -> None:
        self.label, self.asked = label, list[Mapping[bytes, bytes]]()
        self.hangs = self.refuses = self.ends = False
        self.starts = 0  # attempts to reach it that fail

    async def ask(self, body: bytes, headers: Headers) -> NamedReply | None:
        self.asked.append(headers)
        if self.hangs:
            await asyncio.sleep(60)
        if self.ends:
            raise asyncio.CancelledError
        return None if self.refuses else NamedReply(b'{"model": "new", "outputs": []}', (self.label,))

    async def reach(self) -> None:
        if self.starts:
            self.starts -= 1
            raise KeyError("no such application")


def client(other: Other, share: float = 1.0, **terms: object) -> tuple[TestClient, Canary]:
    """A front of the toy network whose canary is the other one."""
    named = {"application": "new", "share": share, **terms}
    config = AppConfig.model_validate({**TOY, "slo_ms": 400, "canary": named})
    chances = iter([0.05, 0.5, 0.95] * 1000)
    assert config.canary
    canary = Canary(config.canary, other.ask, other.reach, lambda: next(chances))

    def opened(driver) -> None:  # type: ignore[no-untyped-def]
        driver.counts.canary = canary.counts

    api = create_api(Service(config, time.perf_counter, opened=opened), canary)
    if not other.starts:
        asyncio.run(canary.begin())
    return DocumentedClient(with_document(api, "the toy with a canary")), canary


def asked(front: TestClient, **headers: str) -> str:
    """Which network answers."""
    return str(front.post("/predict", json={"inputs": [[3, 7]]}, headers=headers).json()["model"])


def test_clients_get_the_canarys_answers_for_its_share() -> None:
    other = Other()
    with client(other, share=0.1)[0] as front:
        models = [asked(front) for _ in range(6)]
        counted = front.get("/stats").json()["canary"]
    assert models == ["new", "toy", "toy"] * 2
    assert counted == {
        "application": "new", "share": 0.1, "shadow": False, "agreement": 0.95, "kept": 2, "missed": 0,
        "withdrawn_by": 0,
    }  # fmt: skip


def test_a_shadow_answers_no_client_and_is_compared() -> None:
    other = Other(label="8")
    with client(other, shadow=True)[0] as front:
        assert asked(front) == "toy"
        assert front.get("/stats").json()["canary"]["missed"] == 1


@pytest.mark.parametrize("fault", ["label", "hangs", "refuses", "ends"])
def test_a_canary_that_is_worse_is_taken_back(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Other labels, late answers and refusals alike; its clients get the present network's answers meanwhile."""
    other = Other()
    with client(other, agreement=0.99)[0] as front:
        assert {asked(front) for _ in range(20)} == {"new"}
        setattr(other, fault, "8" if fault == "label" else True)
        models = [asked(front) for _ in range(40)]
        counted = front.get("/stats").json()["canary"]
    assert counted["withdrawn_by"] == 1
    assert isinstance(counted["withdrawn_by"], int)
    assert 0 < counted["missed"] < 20, "after enough misses, and then no request more"
    assert len(other.asked) == 20 + counted["missed"]
    assert models[-20:] == ["toy"] * 20
    assert fault == "label" or models == ["toy"] * 40
    assert f"of the inputs of {20 + counted['missed']:.0f} requests in time" in caplog.text


def canary_of(front: object, **terms: float) -> Canary:
    return Canary(CanaryTerms(application="new", **terms), front.ask, Other().reach)


async def own(*names: str) -> NamedReply:
    """What the present network answers."""
    return NamedReply(b"mine", names)


async def test_a_canary_that_keeps_its_share_stays() -> None:
    """19 of 20 inputs are as agreed, however many there are."""
    canary = canary_of(Other(), agreement=0.95)
    for number in range(2000):
        await canary.reply(own("7" if number % 20 else "8"), b"", {}, 1.0)
    assert canary.counts == {"kept": 1900, "missed": 100, "withdrawn": 0}


def test_a_request_counts_once_if_its_client_goes_while_the_canary_computes() -> None:
    other = Other()
    other.hangs = True
    with client(other)[0] as front:
        assert front.portal
        asking = front.portal.start_task_soon(_ask_and_leave, front.app)
        asking.result(60)
        requests = front.get("/stats").json()["requests"]
    assert requests == {"answered": 0, "refused": 0, "failed": 0, "abandoned": 1}


async def _ask_and_leave(app: Any) -> None:
    """Ask, and go once the own answer is known."""
    body, parts, sent = b'{"inputs": [[3, 7]]}', asyncio.Queue[Any](), list[Any]()
    await parts.put({"type": "http.request", "body": body})
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "root_path": "", "headers": headers}

    async def send(message: Any) -> None:
        sent.append(message)

    asking = asyncio.create_task(app(scope, parts.get, send))
    await asyncio.sleep(0.05)  # of the 0.32 s that the canary has
    asking.cancel()
    await asyncio.wait([asking])
    assert not sent


def test_requests_for_the_full_network_do_not_go_to_it() -> None:
    other = Other()
    with client(other)[0] as front:
        assert asked(front, **{"X-Full": "1"}) == "toy"
    assert not other.asked


def test_a_canary_that_starts_later_is_reached_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the front answers alone."""
    monkeypatch.setattr("isobatch.deployments.front.canary.AGAIN_S", 0.05)
    other = Other()
    other.starts = 3
    front, canary = client(other)
    with front:
        assert front.portal
        reaching = front.portal.start_task_soon(canary.begin)
        assert asked(front) == "toy"
        reaching.result(60)
        assert asked(front) == "new"
    assert len(other.asked) == 1


def test_the_own_answer_waits_for_the_canary_for_at_most_the_slo() -> None:
    other = Other()
    with client(other)[0] as front:
        other.hangs, began_s = True, time.perf_counter()
        assert asked(front, **{"X-Deadline-Ms": "60000"}) == "toy"
        assert time.perf_counter() - began_s < 30


async def test_one_request_cannot_withdraw_a_canary() -> None:
    """Its inputs may be alike, so it counts once."""
    canary = canary_of(Other())
    await canary.reply(own(*["8"] * 256), b"", {}, 1.0)
    assert canary.counts == {"kept": 0, "missed": 1, "withdrawn": 0}


@contextmanager
def predicting(**fields: object) -> Iterator[tuple[Predict, Driver, BlockingPortal]]:
    """The front of a canary, its driver, and who runs coroutines in it."""
    config, drivers = AppConfig.model_validate({**TOY, **fields}), list[Driver]()
    api = create_api(Service(config, time.perf_counter, opened=drivers.append))
    predict = api.direct["/predict"]
    assert isinstance(predict, Predict)
    with DocumentedClient(api) as front:
        assert front.portal
        yield predict, drivers[0], front.portal


JSON = {b"content-type": b"application/json"}


def test_a_canary_reads_a_body_as_its_client_sent_it() -> None:
    body, headers = b'{"inputs": [[3, 7]]}', JSON | {b"content-encoding": b"gzip"}
    with predicting() as (predict, _, portal):
        whole, packed = (portal.call(predict.computed, *sent) for sent in ((JSON, body), (headers, compress(body))))
    assert whole.names == packed.names


@pytest.mark.parametrize(("deadline_ms", "refused"), [(TIME_SHARE * 400, 1), (100, 0)])
def test_a_canary_counts_its_refusals_of_clients_who_wait_for_the_slo(deadline_ms: float, refused: int) -> None:
    headers = JSON | {b"x-deadline-ms": b"%.3f" % deadline_ms}
    with predicting(slo_ms=400, max_inside=1) as (predict, driver, portal):

        async def two_at_once() -> list[NamedReply | BaseException]:
            replies = (predict.computed(headers, b'{"inputs": [[3, 7]]}') for _ in range(2))
            return await asyncio.gather(*replies, return_exceptions=True)

        _, second = portal.call(two_at_once)
    assert isinstance(second, RefusedError)
    assert "1 inputs may be inside" in str(second)
    assert driver.counts.refused == refused


async def test_a_canary_without_replicas_answers_nothing_and_is_not_withdrawn() -> None:
    canary, parked = canary_of(Other()), canary_of(Parked())
    assert {await parked.reply(own("7"), b"", {}, 60.0) for _ in range(200)} == {b"mine"}
    assert not any(parked.counts.values())
    assert {await canary.reply(own("7"), b"", {}, 60.0) for _ in range(200)} != {b"mine"}


class Parked:
    async def ask(self, body: bytes, headers: Headers) -> NamedReply | None:
        return PARKED


def test_a_parked_canary_says_so_at_once_and_its_controller_learns_that_an_input_came() -> None:
    """It does not wait for its replicas, nor does the client."""
    with predicting(slo_ms=60_000) as (predict, driver, portal):
        dispatcher = driver.dispatcher

        async def ask() -> NamedReply:
            dispatcher.reroute(dispatcher.route, dict.fromkeys(dispatcher.replicas(), ()), wakes_in_s=1.0)
            return await predict.computed(JSON, b'{"inputs": [[3, 7]]}')

        assert portal.call(ask) == PARKED
    assert (driver.counts.arrivals, driver.counts.refused, dispatcher.inside) == (1, 0, 0)


def test_it_gets_the_time_that_is_left_the_priority_and_the_trace() -> None:
    other, trace = Other(), f"00-{'a' * 32}-{'b' * 16}-01"
    given = {"X-Priority": "3", "X-Deadline-Ms": "200", "traceparent": trace, "content-encoding": "identity"}
    with client(other)[0] as front:
        asked(front, **given)
    (headers,) = other.asked
    assert (headers[b"x-priority"], headers[b"traceparent"]) == (b"3", given["traceparent"].encode())
    assert headers[b"content-encoding"] == b"identity", "it gets the body as it was sent"
    assert 100 < float(headers[b"x-deadline-ms"]) <= 160


def test_a_refused_request_is_not_compared() -> None:
    with client(Other())[0] as front:
        assert front.post("/predict", json={"inputs": "no pair"}).status_code == 422
        counted = front.get("/stats").json()["canary"]
    assert (counted["kept"], counted["missed"]) == (0, 0)
