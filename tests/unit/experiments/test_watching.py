"""Whoever watches in `make bench-watching` asks what it should, as often as it should, and is noticed if it cannot."""

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from experiments.watching import run


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """It knows one path, and remembers what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404 if "nowhere" in self.path else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()
        thread.join()


def test_an_open_page_asks_for_counts_and_the_controller(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = server
    monkeypatch.setattr(run, "PAGE_EVERY_S", 0.01)
    with run.page(url) as loaded:
        until_s = time.monotonic() + 10
        while len(asked) < 6 and time.monotonic() < until_s:
            time.sleep(0.01)
    assert loaded == url
    assert asked[:4] == ["/stats", "/controller/status"] * 2
    seen = len(asked)
    time.sleep(0.05)
    assert len(asked) == seen, "it ends with its turn"


def test_who_is_not_answered_is_no_watcher(server: tuple[str, list[str]]) -> None:
    url, asked = server
    watching = run._asking(url, (f"{url}/nowhere",), 10.0)
    watching.__enter__()
    while not asked:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="404"):
        watching.__exit__(None, None, None)


def test_each_way_is_compared_within_its_round() -> None:
    """A machine that is twice as fast in the second round changes no ratio."""
    rounds = [{"nobody": run.Turn(1000.0, 0.001), "page": run.Turn(980.0, 0.00102)}]
    rounds += [{"nobody": run.Turn(2000.0, 0.0005), "page": run.Turn(1960.0, 0.00051)}]
    figures = run.ratios("page", rounds)
    assert figures["page_rps_ratio"] == pytest.approx(0.98)
    assert figures["page_rps_ratio_lower_quartile"] == pytest.approx(0.98)
    assert figures["page_work_ratio"] == pytest.approx(1 / 1.02)
