"""A browser opens the page of the real demo, draws a digit and reads its answer, at a desk and on a phone."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from deployments.config import AppConfig
from deployments.front.http import create_api
from deployments.front.service import Service

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here: make browser installs it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: make browser says how to install it")

DESK, PHONE = 1200, 360  # pixels
PATIENCE_MS = 60_000
Open = Callable[[str, int], tuple[Any, list[str]]]


def _served(config: AppConfig) -> Iterator[str]:
    """The front as it is without a plan: the page asks nothing that a front on Ray does not answer as well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = create_api(Service(config, time.perf_counter))
    server = uvicorn.Server(uvicorn.Config(api, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    yield from _served(AppConfig(name="demo"))


@pytest.fixture
def behind_a_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("KEY", "secret")
    yield from _served(AppConfig(name="demo", api_key_variable="KEY"))


@pytest.fixture(scope="module")
def open_page() -> Iterator[Open]:
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def opened(url: str, width: int) -> tuple[Any, list[str]]:
            page, errors = browser.new_page(viewport={"width": width, "height": 900}), list[str]()
            page.set_default_timeout(PATIENCE_MS)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda said: said.type == "error" and errors.append(said.text))
            page.goto(url)
            return page, errors

        yield opened
        browser.close()


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_a_digit_is_drawn_and_its_way_is_shown(demo: str, open_page: Open, width: int) -> None:
    page, errors = open_page(demo, width)
    canvas = page.locator("#draw canvas")
    canvas.wait_for()
    box = canvas.bounding_box()
    middle_x, top, bottom = box["x"] + box["width"] / 2, box["y"] + 15, box["y"] + box["height"] - 15
    page.mouse.move(middle_x, top)
    page.mouse.down()
    page.mouse.move(middle_x, bottom, steps=12)  # a one
    page.mouse.up()
    answer = page.locator("#answer p").inner_text()
    assert answer.startswith("1,")
    assert "it left after block" in answer
    assert page.locator("#answer rect").count() == 8
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # This front has no controller beside it, and browsers write down every 404.
    assert [error for error in errors if "404" not in error] == []
    page.close()


def test_load_from_the_page_shows_in_its_numbers(demo: str, open_page: Open) -> None:
    page, _ = open_page(demo, DESK)
    page.fill("#rate", "200")
    ends_s = time.monotonic() + PATIENCE_MS / 1e3
    while int(page.locator("#numbers dd").first.inner_text().removesuffix("/s")) < 20:
        assert time.monotonic() < ends_s
        time.sleep(0.2)
    assert page.locator("#splits rect.full").count() > 0
    page.close()


def test_a_key_is_asked_for_and_then_shown(behind_a_key: str, open_page: Open) -> None:
    page, _ = open_page(behind_a_key, DESK)
    page.fill("#key input", "secret")
    page.click("#key button")
    page.wait_for_selector("#numbers dd")
    assert page.locator("#model").inner_text() == "demo"
    assert page.evaluate("document.cookie + JSON.stringify({...localStorage})") == "{}"
    page.close()
