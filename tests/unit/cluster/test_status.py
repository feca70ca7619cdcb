"""The controller's HTTP side and the command that asks it, over a real socket."""

import json
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from typer.testing import CliRunner

from cluster.cli import app
from cluster.controller.api import create_api
from profiles.errors import UserError
from tests.unit.cluster.fluid import MEDIUM, Fluid, batches, controller, first_plan, question, run


class Leader:
    """Without a loop: what a test does is all that happens."""

    name, waits_for = "toy", "the application to run"

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        asked = question(MEDIUM)
        self.key: bytes | None = None
        self.app = Fluid(asked, batches(first_plan(asked), 4))
        self.controller = controller(self.app)

    async def lead(self) -> None:
        pass


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Leader, str]]:
    """One server for all: to stop takes longer than any test."""
    leader = Leader()
    config = uvicorn.Config(create_api(leader), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield leader, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def leader(served: tuple[Leader, str]) -> Leader:
    served[0].begin()
    return served[0]


@pytest.fixture
def url(leader: Leader, served: tuple[Leader, str]) -> str:
    return served[1]


def asked(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["status", *arguments, "--path", ""], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_it_shows_plan_forecast_and_decisions(leader: Leader, url: str) -> None:
    run(leader.app, leader.controller, 400)
    shown = json.loads(asked(url, "--json"))
    assert shown["application"] == "toy"
    assert [event["what"] for event in shown["events"]] == ["rolled out", "stayed", "stayed"]
    assert shown["forecast"]["low"][1] <= shown["forecast"]["survival"][1] <= shown["forecast"]["high"][1]
    text = asked(url)
    for word in (
        "promises kept",
        "arrivals forecast",
        "rolled out",
        "open",
        "next decision",
        "from blocks",
        "to blocks",
    ):
        assert word in text


def test_before_the_first_window_much_is_unknown_and_nothing_breaks(url: str) -> None:
    assert json.loads(asked(url, "--json"))["forecast"] is None
    assert "p99 ? ms" in asked(url)


def test_a_dry_run_changes_nothing_and_force_does_not_wait(leader: Leader, url: str) -> None:
    before = leader.app.running
    assert asked(url, "--dry-run").startswith("stayed: 0 inputs were seen")
    assert leader.app.running == before
    assert "asked by hand: " in asked(url, "--force")
    assert leader.app.running != before


def test_pause_and_resume(leader: Leader, url: str) -> None:
    assert "plans stay as they are" in asked(url, "--pause")
    assert leader.controller.core.record.paused
    assert "when it is worth it" in asked(url, "--resume")
    assert not leader.controller.core.record.paused


def test_while_the_application_starts_one_line_says_so(leader: Leader, url: str) -> None:
    leader.controller = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="the controller waits for the application to run"):
        asked(url)


def test_an_address_where_nobody_is_or_somebody_else(url: str) -> None:
    with pytest.raises(UserError, match=r"nobody answers at http://127.0.0.1:9/status \(Connection refused\)"):
        asked("http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"no controller runs at .*: add the application"):
        asked(f"{url}/elsewhere")
    with pytest.raises(UserError, match="'nonsense' must look like http://"):
        asked("nonsense")


def test_the_key_is_asked_for(leader: Leader, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leader.key = b"secret"
    with pytest.raises(UserError, match="asks for a key"):
        asked(url)
    monkeypatch.setenv("THE_KEY", "secret")
    assert "toy" in asked(url, "--api-key-variable", "THE_KEY")
    with pytest.raises(UserError, match="NO_KEY"):
        asked("http://127.0.0.1:9", "--api-key-variable", "NO_KEY")


def test_one_thing_at_a_time() -> None:
    with pytest.raises(UserError, match="one at a time"):
        asked("--pause", "--force")
