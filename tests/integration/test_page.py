"""A browser opens the page of the real demo under load: it draws a digit, sees plans change and a replica die.

With ISOBATCH_PICTURES=1 (`make pictures`) it also writes the pictures of docs/watching.md.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.controller.application import RunningApplication
from isobatch.cluster.controller.config import ArbiterConfig, MemberTerms
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.fleet_division import Standing
from isobatch.cluster.serving.local import ROOT
from isobatch.deployments.config import AppConfig
from isobatch.deployments.front.http import create_api
from isobatch.deployments.front.service import Service
from isobatch.optimizer.plan import Placement, Plan, Split
from tests.helpers.asking import ask, eventually
from tests.helpers.cascade_directories import cascade_directory
from tests.helpers.fluid_application import MEDIUM, question
from tests.helpers.serving import in_a_thread
from tests.helpers.tiny_pixels import GRID, drawn, png, upernet
from tests.helpers.tiny_points import NAMES as COLOURS
from tests.helpers.tiny_points import SIDES, random_network, reference, spots
from tests.helpers.tiny_words import word_network
from tests.integration.conftest import Put, Run

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here: make browser installs it")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe here: make browser installs it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: make browser says how to install it"),
    pytest.mark.beside("shown"),
]

DESK, PHONE = 1280, 360  # pixels
PATIENCE_MS = 90_000
GRAVE = {"serious", "critical"}
NO_ANSWER = (401, 503, 504)  # no key was shown yet; a busy machine refuses some of the load
POOR = Plan(tuple(Placement("cpu", 1, (Split(start, stop, 4, ()),)) for start, stop in ((0, 3), (3, 8))))
PICTURES = Path(__file__).parents[2] / "docs" if os.environ.get("ISOBATCH_PICTURES") else None


@pytest.fixture(scope="module")
def shown(deployed: Put, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo as it is shipped, with a controller that decides when it is told to."""
    content = {
        "plan": str(ROOT / "cluster/demo/plan.json"),
        "profile": str(ROOT / "cluster/demo/profile.json"),
        "name": "demo",
        "replan": True,
        "cpus_per_replica": 0,
        "slo_ms": 20_000,
        "agreement": 0.95,
    }
    memory = str(tmp_path_factory.mktemp("controller"))
    steering = {"application": "demo", "memory": memory, "replan_every_s": 3600.0, "max_batch": 32}
    return deployed(
        {"name": "demo", "import_path": "isobatch.deployments.app:build", "route_prefix": "/", "args": content},
        {
            "name": "controller",
            "import_path": "isobatch.cluster.controller.app:build",
            "route_prefix": "/controller",
            "args": steering,
        },
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as browsers:
        opened = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def page_at(browser: Any, url: str, width: int) -> Iterator[Any]:
    """An open page; when the block ends it must have had no error. (Browsers write down refusals, too.)"""
    page, errors = browser.new_page(viewport={"width": width, "height": 900}), list[str]()
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: said.type == "error" and errors.append(said.text))
    page.goto(url)
    try:
        yield page
    finally:
        page.close()
    assert [error for error in errors if not any(f"status of {each}" in error for each in NO_ANSWER)] == []


@pytest.fixture(scope="module")
def page(browser: Any, shown: str) -> Iterator[Any]:
    """The one page at a desk that the tests share, under its own load."""
    with page_at(browser, shown, DESK) as opened:
        opened.wait_for_selector("#draw canvas")
        opened.fill("#rate", "100")
        yield opened


def answered_per_s(page: Any) -> float:
    return float(page.locator("#numbers dd").first.inner_text().removesuffix("/s").replace(",", ""))


def plan_shown(page: Any) -> str:
    return str(page.locator("#plan").inner_text())


def drawn_as_one(page: Any) -> bool:
    """Draws it until it is answered as one: a busy browser may move the canvas meanwhile, or pass over places."""
    return eventually(lambda: draw_a_line(page).startswith("1,"))


def draw_a_line(page: Any) -> str:
    """From top to bottom. Returns what is answered to it half a second later."""
    page.click("#wipe")
    canvas = page.locator("#draw canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    middle_x, top, bottom = box["x"] + box["width"] / 2, box["y"] + 15, box["y"] + box["height"] - 15
    page.mouse.move(middle_x, top)
    page.mouse.down()
    page.mouse.move(middle_x, bottom, steps=12)
    page.mouse.up()
    page.wait_for_timeout(500)
    return str(page.locator("#answer").inner_text())


def grave_faults(page: Any) -> list[tuple[str, str]]:
    result = axe.Axe().run(page).response["violations"]
    return [(fault["id"], node["html"]) for fault in result if fault["impact"] in GRAVE for node in fault["nodes"]]


def keep_picture(page: Any, name: str) -> None:
    """For the docs, under more load; 64 colours are enough for what the page shows, and a third of the bytes."""
    if PICTURES is None:
        return
    from PIL import Image

    path = PICTURES / name
    before = page.locator("#rate").input_value()
    page.fill("#rate", "1000")
    page.wait_for_timeout(12_000)  # longer than the shares look back
    page.screenshot(path=path, full_page=True)
    page.fill("#rate", before)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(64).save(path, optimize=True)


def test_load_from_the_page_shows_in_its_numbers(page: Any) -> None:
    assert eventually(lambda: answered_per_s(page) >= 20)
    assert eventually(lambda: page.locator("#splits rect.full").count() > 0)
    assert page.locator("#splits li").count() == 2
    assert page.locator("#river rect.full").count() == page.locator("#river rect.left").count() == 8


def test_a_digit_is_drawn_and_its_way_is_shown(page: Any) -> None:
    assert drawn_as_one(page)
    assert page.locator("#answer rect").count() == 8
    assert "launch" in page.locator("#answer li").first.inner_text()


def test_agreement_is_drawn_beside_its_promise(page: Any) -> None:
    """Audits run beside the load of the page."""
    page.wait_for_selector("#agreement svg")
    assert page.locator("#agreement text").last.text_content().split(": ")[1] in {"kept", "not watched"}
    assert page.locator("#agreement circle").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_shut_out(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    assert grave_faults(page) == []
    keep_picture(page, "page.png" if scheme == "light" else "page-dark.png")


def test_it_fits_a_phone(browser: Any, shown: str, page: Any) -> None:
    with page_at(browser, shown, PHONE) as phone:
        assert drawn_as_one(phone)
        phone.wait_for_selector("#splits rect.full")
        assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE
        assert grave_faults(phone) == []
        keep_picture(phone, "page-phone.png")


def test_the_plan_is_seen_to_change(page: Any, run: Run) -> None:
    """Once by hand to a poor one, and once when the controller is told to decide."""
    assert "at 4" not in plan_shown(page)
    run(RunningApplication("demo").roll_out(POOR))
    assert eventually(lambda: "at 4" in plan_shown(page))
    assert "The plan changed" in page.locator("#changed").inner_text()
    page.click("#force")
    assert eventually(lambda: "at 4" not in plan_shown(page))
    assert eventually(lambda: "rolled out" in page.locator("#events li").first.inner_text())
    assert eventually(lambda: answered_per_s(page) >= 20)


def test_a_dead_replica_is_seen_and_survived(page: Any, shown: str, run: Run) -> None:
    from ray.serve.context import _get_global_client

    details = _get_global_client().get_serve_details()["applications"]
    replicas = [
        replica["pid"]
        for name, application in details.items()
        if name.startswith("demo.")
        for replica in application["deployments"]["split"]["replicas"]
    ]
    failed = ask(shown, "GET", "/stats")[1]["requests"]["failed"]
    devices = page.locator("#splits li").first.locator(".device")
    assert devices.count() == len(replicas)
    os.kill(replicas[0], signal.SIGKILL)
    assert eventually(lambda: devices.count() < len(replicas))
    assert eventually(lambda: devices.count() == len(replicas) and answered_per_s(page) >= 20)
    assert eventually(page.locator("#trouble").is_hidden)
    assert ask(shown, "GET", "/stats")[1]["requests"]["failed"] == failed


def test_a_key_is_asked_for_and_then_shown(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    with unsteered(AppConfig(name="demo", api_key_variable="KEY")) as url, page_at(browser, url, DESK) as page:
        page.fill("#key input", "secret")
        page.click("#key button")
        page.wait_for_selector("#numbers dd")
        assert page.locator("#model").inner_text() == "demo"
        assert page.evaluate("document.cookie + JSON.stringify({...localStorage})") == "{}"


def test_labels_of_words_stand_below_them(browser: Any) -> None:
    config = AppConfig(model=str(word_network()))
    with unsteered(config) as url, page_at(browser, url, PHONE) as phone:
        phone.fill("#say textarea", "ada bee was in rome .")
        phone.click("#say button")
        phone.wait_for_selector("#answer rect")
        labels = [label.split()[0] for label in phone.locator("#answer rt").all_inner_texts()]
        assert labels == ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]
        assert phone.locator("#forecast").is_hidden(), "nobody forecasts"
        assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE
        assert grave_faults(phone) == []


def drop(page: Any, picture: Any) -> None:
    """Let a file fall onto the page, as from a folder."""
    script = """(bytes) => {
      const held = new DataTransfer();
      held.items.add(new File([new Uint8Array(bytes)], "a.png", { type: "image/png" }));
      return held;
    }"""
    page.wait_for_selector("#drop:not([hidden])")
    page.dispatch_event("#try", "drop", {"dataTransfer": page.evaluate_handle(script, list(png(picture)))})


def test_a_map_lies_over_the_dropped_picture(browser: Any) -> None:
    (picture,) = drawn(1, seed=9).pictures
    with (
        unsteered(AppConfig(model=str(upernet("convnext")), slo_ms=60_000)) as url,
        page_at(browser, url, PHONE) as phone,
    ):
        drop(phone, picture)
        phone.wait_for_selector("#answer .map img:nth-child(2)")
        shown, over = phone.locator("#answer .map img").all()
        assert over.bounding_box() == shown.bounding_box()
        assert over.evaluate("image => image.decode().then(() => image.naturalWidth)") == GRID
        assert grave_faults(phone) == []


def test_points_lie_on_the_dropped_picture(browser: Any) -> None:
    (picture,) = spots(1, seed=9).pictures
    _, (points,) = reference(picture[None], random_network("classic"))
    with (
        unsteered(AppConfig(model=str(random_network("classic")), slo_ms=60_000)) as url,
        page_at(browser, url, PHONE) as page,
    ):
        drop(page, picture)
        page.wait_for_selector("#answer .map svg[viewBox]")
        shown = page.locator("#answer .map img").bounding_box()
        circles = page.locator("#answer .map circle")
        assert [name.split(",")[0] for name in circles.locator("title").all_text_contents()] == list(COLOURS)
        for circle, expected in zip(circles.all(), points.tolist(), strict=True):
            box = circle.bounding_box()
            x, y = (
                (box[at] + box[size] / 2 - shown[at]) / shown[size] * whole
                for at, size, whole in (("x", "width", SIDES.width), ("y", "height", SIDES.height))
            )
            assert (x, y) == pytest.approx(expected, abs=0.5)  # of a pixel of the picture
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
        assert grave_faults(page) == []


def test_it_is_said_which_level_of_a_cascade_answered(browser: Any, tmp_path: Path) -> None:
    with unsteered(AppConfig(model=str(cascade_directory(tmp_path)))) as url, page_at(browser, url, DESK) as page:
        page.fill("#say textarea", "a good film")
        page.click("#say button")
        page.wait_for_selector("#answer rect")
        assert "of the cascade answered" in page.locator("#answer p").nth(1).inner_text()


def fleet_of(*names: str) -> Any:
    """The page of an arbiter that has moved devices to the last of two applications."""
    from isobatch.cluster.controller.fleet_service import FleetService

    class Led(FleetService):
        """Its loop does nothing by itself: the test says what controllers answer."""

        async def run(self) -> None:
            pass

    own = {"v100": 2, "k80": 2}
    problem = question(MEDIUM, v100=4, k80=4)
    facts = problem.facts(MEDIUM, Corrections())
    calm = Standing(facts, problem.objective, 12.5, 1.0, own, own, False, arrivals_per_s=11.4, goodput_per_s=11.4)
    flooded = replace(calm, expected_per_s=1e5, refuses=True, arrivals_per_s=98_765.4, goodput_per_s=1234.5)
    terms = tuple(MemberTerms(name=name, devices=own, controller="c") for name in names)
    service = Led(ArbiterConfig(devices={"v100": 4, "k80": 4}, applications=terms))
    standings = dict(zip(names, (calm, flooded), strict=True))
    service.note(standings)
    for at_s in (1e9, 1e9 + 5.0):
        service.arbiter.look(standings, service.config.devices, at_s)
    return service.__serve_build_asgi_app__()


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_the_page_of_a_fleet_shows_who_has_which_devices_and_why(browser: Any, width: int) -> None:
    api = fleet_of("product-reviews", "queries")
    with in_a_thread(api) as base, page_at(browser, f"{base}/", width) as page:
        page.wait_for_selector("#applications tr")
        rows = [row.split("\t") for row in page.locator("#applications").inner_text().splitlines()]
        assert [row[0] for row in rows] == ["product-reviews", "queries"]
        assert rows[1][2:] == ["1,234.5", "98,765.4", "100,000", "refuses inputs"]
        assert "inputs of queries are refused: " in page.locator("#decisions li").first.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert grave_faults(page) == []


@contextmanager
def unsteered(config: AppConfig) -> Iterator[str]:
    """A front without Ray: the page asks nothing that a front on Ray does not answer as well."""
    with in_a_thread(create_api(Service(config, time.perf_counter))) as base:
        yield f"{base}/"
