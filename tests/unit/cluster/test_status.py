"""The controller's HTTP side and the command that asks it, over a real socket."""

import asyncio
import http.client
import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isobatch.cluster.cli import app
from isobatch.cluster.commands.status import ask, sparkline, tables, watched
from isobatch.cluster.controller.config import ArbiterConfig, MemberTerms
from isobatch.cluster.controller.service import create_api
from isobatch.deployments.config import AppConfig
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.openai_api import create_decoder_api
from isobatch.deployments.decoding.replica import ReplicaState
from isobatch.deployments.decoding.replica_group import summed
from isobatch.deployments.front.http import create_api as create_front
from isobatch.deployments.front.observed import Observed
from isobatch.deployments.front.service import Service
from isobatch.optimizer.plan import Promise, SimulatedTimes
from isobatch.profiles.errors import UserError
from tests.helpers.commands import ran
from tests.helpers.documented import DocumentedClient, ask_examples, check_document
from tests.helpers.fluid_application import MEDIUM, Fluid, control_loop, improvable, question, run
from tests.helpers.serving import in_a_thread


class Toy:
    """A service whose loop does nothing by itself: what a test does is all that happens."""

    name, waits_for = "toy", "the application to run"
    ended = False
    promise = "at most 1 % of accuracy lost"

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.key: bytes | None = None
        self.hosts: tuple[str, ...] = ()
        self.app = improvable()
        self.loop = control_loop(self.app)

    async def run(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Toy, str]]:
    """One server for all: to stop takes longer than any test."""
    toy = Toy()
    with in_a_thread(create_api(toy)) as url:
        yield toy, url


@pytest.fixture
def toy(served: tuple[Toy, str]) -> Toy:
    served[0].begin()
    return served[0]


@pytest.fixture
def url(toy: Toy, served: tuple[Toy, str]) -> str:
    return served[1]


def asked(*arguments: str) -> str:
    return ran("status", *arguments, "--path", "")


def test_it_shows_plan_forecast_and_decisions(toy: Toy, url: str) -> None:
    run(toy.app, toy.loop, 400)
    shown = json.loads(asked(url, "--json"))
    assert shown["application"] == "toy"
    assert [event["what"] for event in shown["events"]] == ["rolled out", "stayed", "stayed", "stayed"]
    assert shown["forecast"]["low"][1] <= shown["forecast"]["survival"][1] <= shown["forecast"]["high"][1]
    text, words = asked(url), ("at most 1 % of accuracy lost", "arrivals forecast", "next decision")
    for word in (*words, "sustains now", "rolled out", "open", "from blocks", "to blocks"):
        assert word in text
    toy.app.full = lambda at_s: 0.3
    run(toy.app, toy.loop, 300)
    toy.app.rate = lambda at_s: 0.0
    run(toy.app, toy.loop, 620)
    share = json.loads(asked(url, "--json"))["full_share"]
    assert share == pytest.approx(0.3, abs=0.02)
    text = " ".join(asked(url).replace("│", " ").split())
    assert f"{share:.1%} of the inputs" in text
    assert text.count("no input arrived") == 1
    assert "times more since" in text, "a decision that is made again and again is one row"


class Choked(Fluid):
    """Other programs of the machine make two thirds of the answers late, though launches take no longer."""

    async def observe(self, devices: bool = True) -> Observed:
        seen = await super().observe(devices)
        return replace(seen, in_time=seen.in_time // 3, refused=0)


def test_inputs_that_are_late_contradict_what_launches_would_sustain(toy: Toy, url: str) -> None:
    toy.app = Choked(question(MEDIUM))
    toy.app.rate = lambda at_s: 100.0
    toy.loop = control_loop(toy.app)
    run(toy.app, toy.loop, 60)
    row = next(line for line in asked(url).splitlines() if "sustains now" in line)
    assert re.search(r"3\d(\.\d)? of \d+(\.\d)? per second; by its launches, it would be \d{3,}", row), row
    toy.app.rate = lambda at_s: 0.0
    run(toy.app, toy.loop, 120)
    row = next(line for line in asked(url).splitlines() if "sustains now" in line)
    assert re.search(r"│ \d{3,} per second", row), row


def test_what_was_promised_is_told_as_it_was_played(toy: Toy, url: str) -> None:
    answer = json.loads(asked(url, "--json"))
    assert (answer["plan"]["simulated_p99_ms"], answer["plan"]["simulated_in_time"]) == (None, None)
    running = toy.loop.controller.running
    promise = Promise(48.0, latency_s=0.9496, cost_per_hour=1.0, gap=0.0, simulated=SimulatedTimes(0.12, 0.481, 0.99))
    toy.loop.controller.running = replace(running, promise=promise)
    shown = json.loads(asked(url, "--json"))["plan"]
    assert [shown[f"simulated_{name}"] for name in ("p50_ms", "p99_ms", "in_time")] == [120.0, 481.0, 0.99]
    row = next(line for line in asked(url).splitlines() if "promised" in line)
    assert "48 in time per second, simulated p50 120 ms, p99 481 ms" in " ".join(row.split())


def test_what_a_server_says_is_shown_as_it_is(toy: Toy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it looks like a style of Rich."""
    monkeypatch.setattr(toy, "promise", "at most [bold]1[/red] %")
    assert "at most [bold]1[/red] %" in asked(url)


def test_the_interface_is_described_and_all_of_it_is_answered(toy: Toy) -> None:
    client = DocumentedClient(create_api(toy), base_url="http://127.0.0.1:8000")
    check_document(client.app.openapi())
    assert ask_examples(client) == 5
    run(toy.app, toy.loop, 400)
    assert client.get("/status").json()["forecast"]
    assert ask_examples(client) == 5
    assert client.post("/pause", headers={"Origin": "http://evil.example"}).status_code == 403
    toy.loop = None  # type: ignore[assignment]
    assert client.get("/status").status_code == 503
    assert client.get("/docs").status_code == client.get("/page/docs.js").status_code == 200
    toy.key = b"secret"
    assert client.get("/status").status_code == 401


def test_before_the_first_window_much_is_unknown_and_nothing_breaks(url: str) -> None:
    assert json.loads(asked(url, "--json"))["forecast"] is None
    assert "p99 ? ms" in asked(url)


def test_a_dry_run_changes_nothing_and_force_does_not_wait(toy: Toy, url: str) -> None:
    before = toy.app.running
    assert asked(url, "--dry-run").startswith("stayed: 0 recent inputs are known")
    assert toy.app.running == before
    assert "forced by a person: " in asked(url, "--force")
    assert toy.app.running != before


def test_pause_and_resume(toy: Toy, url: str) -> None:
    assert "plans stay as they are" in asked(url, "--pause")
    assert toy.loop.controller.record.paused
    assert "when it is worth it" in asked(url, "--resume")
    assert not toy.loop.controller.record.paused


def test_it_goes_on_while_a_controller_that_has_answered_starts_again(toy: Toy, url: str) -> None:
    console, working = Console(file=(screen := io.StringIO()), width=160), toy.loop
    loops = iter([None, working])

    def look(_: object) -> Any:
        return tables(ask(f"{url}/status", None)), None

    def wait(_: float) -> None:
        try:
            toy.loop = next(loops)  # type: ignore[assignment]
        except StopIteration:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        watched(look, console, console, wait)
    shown = screen.getvalue()
    assert shown.count("status: the controller waits for the application to run (the next look is in 2 s)") == 1
    assert shown.count("next decision") == 3, "the last answer stays"


def test_it_ends_where_another_look_cannot_help(toy: Toy, url: str) -> None:
    console = Console(file=io.StringIO())

    def look(_: object) -> Any:
        return tables(ask(f"{url}/status", None)), None

    def locks(_: float) -> None:
        assert toy.key is None
        toy.key = b"secret"

    with pytest.raises(UserError, match="asks for a key"):
        watched(look, console, console, locks)
    with pytest.raises(UserError, match="nobody answers"):
        asked("http://127.0.0.1:9", "--watch")
    toy.key, toy.loop = None, None  # type: ignore[assignment]
    with pytest.raises(UserError, match="the controller waits for the application to run"):
        asked(url)


def test_an_address_where_nobody_is_or_somebody_else(url: str) -> None:
    with pytest.raises(UserError, match=r"nobody answers at http://127.0.0.1:9/status \(Connection refused\)"):
        asked("http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"no controller runs at .*: add isobatch.cluster.controller.app:build"):
        asked(f"{url}/elsewhere")
    with pytest.raises(UserError, match=r"nobody answers at http://127\.0\.0\.1:9/elsewhere/status"):
        ran("status", "http://127.0.0.1:9", "--path", "elsewhere")
    with pytest.raises(UserError, match="'nonsense' must look like http://"):
        asked("nonsense")
    with pytest.raises(UserError, match="one at a time"):
        asked("--pause", "--force")


@pytest.mark.parametrize("body", [b"[1, 2]", b'{"a": 1}', b'{"splits": []}', b'{"applications": {}}'])
def test_a_server_that_answers_every_path_with_other_json_is_not_isobatch(body: bytes) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})

    with in_a_thread(other) as place:
        for options in ((), ("--watch",), ("--force",)):
            with pytest.raises(UserError, match=r"http://.* does not answer as isobatch does"):
                ran("status", place, *options)


def test_the_address_of_the_controller_itself_works_too(toy: Toy, url: str) -> None:
    assert ran("status", url) == asked(url)


def test_the_key_is_asked_for(toy: Toy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.key = b"secret"
    with pytest.raises(UserError, match="asks for a key"):
        asked(url)
    monkeypatch.setenv("THE_KEY", "secret")
    assert "toy" in asked(url, "--api-key-variable", "THE_KEY")
    with pytest.raises(UserError, match="NO_KEY"):
        asked("http://127.0.0.1:9", "--api-key-variable", "NO_KEY")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://{here}"}, 200),
        ({"Origin": "http://{here}", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.example"}, 403),
        ({"Host": "x" * 5000 + ".com"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}, 403),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "isobatch.internal:8000"}, 200),
        ({"Host": "front"}, 200),
    ],
)
def test_no_page_of_others_may_steer(url: str, headers: dict[str, str], status: int) -> None:
    here = url.removeprefix("http://")
    fields = {name: value.format(here=here) for name, value in headers.items()}
    for path in ("/pause", "/resume") + ("/force",) * (status == 403):
        result, content = post(here, path, fields)
        assert result == status, content
        assert (list(json.loads(content)) == ["error"]) == (status == 403)
        assert len(content) <= 1024


def post(place: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(place, timeout=30)
    connection.request("POST", path, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.read()


def test_the_picture_is_of_what_happened_since_the_last_look(toy: Toy, url: str) -> None:
    run(toy.app, toy.loop, 400)
    answer = json.loads(asked(url, "--json"))
    answer["plan"]["ramps"] = [*range(len(answer["survival"]))]
    split = {"blocks": [0, 3], "group": "v100-0", "replicas": 2, "batch": 8, "launches": 10, "fill": 0.5, "waiting": 3}
    earlier = {"splits": [split], "exits": {"0": 100, "1": 0}, "survival": [1.0, 0.0]}
    stats = earlier | {"splits": [split | {"launches": 20, "fill": 0.75}], "exits": {"0": 150, "1": 50}}
    console = Console(file=io.StringIO(), width=120)
    console.print(tables(answer, stats, earlier))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "blocks 0-2" in shown
    assert "2 x v100" in shown
    assert "█" * 24 in shown, "the ten new launches were full"
    assert "100%" in shown
    assert "█▅" in shown, "half of the new ones reached block 1"
    assert sparkline(answer["survival"]) in shown


def test_the_forecast_of_the_picture_lets_no_input_leave_at_a_closed_ramp(toy: Toy, url: str) -> None:
    run(toy.app, toy.loop, 400)
    answer, stats = json.loads(asked(url, "--json")), {"splits": [], "exits": {}, "survival": []}
    answer["survival"], answer["plan"]["ramps"] = [1.0, 0.7, 0.3], [1]
    console = Console(file=io.StringIO(), width=120)
    console.print(tables(answer, stats))
    assert "██▃" in console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_controller_the_picture_is_drawn_all_the_same() -> None:
    config = AppConfig(model="/models/toy", loader="tests.helpers.toy_model:load")
    with in_a_thread(create_front(Service(config, time.perf_counter))) as url:
        result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["status", url])
        assert result.exit_code == 0, result.output
        for word in ("toy", "the whole network runs in the front", "controller", "no launches", "blocks 0-3"):
            assert word in result.output
        refused = CliRunner().invoke(app, ["status", url, "--json"])
        assert "no controller runs at" in str(refused.exception)


class Decoding:
    """All of a decoder's front that its /stats needs."""

    name, key, tracing = "tiny", None, None
    config = DecoderConfig(model="/models/tiny")

    @staticmethod
    async def stats() -> dict[str, Any]:
        state = ReplicaState(2, 1, 6, 8, 0, 40.0, {0: 30, 3: 10}, {0: (2, 4, 16)})
        requests = {"answered": 3, "refused": 1}
        about = {"schema_version": 1, "model": "tiny", "requests": requests, "workload": {}}
        return about | summed([state], num_blocks=4)


def test_a_decoder_is_shown_without_a_controller_and_with_one(toy: Toy, url: str) -> None:
    front: Any = Decoding()
    words = ("tiny", "3 answered, 1 refused", "40, 1.8 of 4 blocks each, 40/s", "6 of 8 free", "25%")
    with in_a_thread(create_decoder_api(front)) as alone:
        shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["status", alone], catch_exceptions=False).output
        for word in (*words, "the plan stays as it is"):
            assert word in shown
        for option in ("--json", "--pause", "--dry-run"):
            refused = CliRunner().invoke(app, ["status", alone, option])
            assert "no controller runs at" in str(refused.exception)
        stats = ask(f"{alone}/stats", None)
    console = Console(file=(screen := io.StringIO()), width=120)
    console.print(tables(json.loads(asked(url, "--json")), stats, stats))
    for word in (*words, "next decision"):
        assert word in screen.getvalue()
    assert "the plan stays as it is" not in screen.getvalue()


def test_a_fleet_shows_who_has_which_devices_what_moved_and_why(toy: Toy) -> None:
    from isobatch.cluster.controller.fleet_service import FleetService

    class Led(FleetService):
        """Its loop does nothing by itself: the test says what controllers answer."""

        async def run(self) -> None:
            pass

    run(toy.app, toy.loop, 400)
    half = {"v100": 2}
    standing = replace(asyncio.run(toy.loop.standing()), budget=half, uses=half)
    assert standing.arrivals_per_s > 0
    terms = [MemberTerms(name=name, devices=half, controller="c") for name in ("reviews", "queries")]
    service = Led(ArbiterConfig(devices={"v100": 4}, applications=tuple(terms)))
    idle = {"reviews": replace(standing, expected_per_s=0.0), "queries": standing}
    service.arbiter.look(idle, {"v100": 4}, 0.0)
    flooded = idle | {"queries": replace(standing, expected_per_s=1e6, refuses=True, goodput_per_s=123.0)}
    service.note(flooded)
    grants = service.arbiter.look(flooded, {"v100": 4}, 5.0)
    answered = replace(idle["reviews"], budget=grants["reviews"].budget)
    service.arbiter.look(flooded | {"reviews": answered}, {"v100": 4}, 6.0)
    api = service.__serve_build_asgi_app__()
    check_document(api.openapi())
    assert DocumentedClient(api, base_url="http://localhost:8000").get("/status").json()["silent"] == []
    with in_a_thread(api) as url:
        result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["status", url], catch_exceptions=False)
        shown = " ".join(result.stdout.split())
        assert "queries │ 2 v100 │ 123 │" in shown
        assert "reviews │ 1 v100 │" in shown, "what it gives is no longer its own once it has answered"
        assert "refuses inputs" in shown
        assert "inputs of queries are refused: weighted goodput" in shown
        assert "reviews gives 1 v100; queries gets 1 v100" in shown
        assert "queries │ 2 v100" in " ".join(asked(url).split())
        output = CliRunner().invoke(app, ["status", url, "--json"], catch_exceptions=False)
        assert json.loads(output.stdout)["applications"]["queries"]["goodput_per_s"] == 123.0
        service.note({"reviews": idle["reviews"]})
        silent = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["status", url], catch_exceptions=False)
        assert "its controller does not answer" in silent.stdout
