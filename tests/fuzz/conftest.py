"""What is attacked, and what came of each case: told at the end; `make fuzz` also keeps it."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from experiments.bench import Conditions, write
from tests.fuzz.attack import COUNTS, LONG
from tests.fuzz.live import Live, live_server
from tests.fuzz.served import Served

CONDITIONS = Conditions()
KEPT = "ISOBATCH_FUZZ_KEPT" in os.environ


def pytest_itemcollected(item: pytest.Item) -> None:
    """Those of a file attack one server in one process (--dist loadgroup): its honest client is judged last."""
    if "served" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where several processes attack, each tells the first of them what came of its cases."""
    if result := getattr(session.config, "workeroutput", None):
        result["fuzz"] = [(*of, n) for of, n in COUNTS.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    COUNTS.update({(kind, what): n for kind, what, n in getattr(node, "workeroutput", {}).get("fuzz", ())})


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    served = Served()
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A real `isobatch serve`. Its start takes longer than all short cases, so that only long runs have it."""
    if not LONG:
        pytest.skip("only make fuzz starts a server")
    with live_server(tmp_path_factory.mktemp("live")) as live:
        yield live


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if not COUNTS or hasattr(terminalreporter.config, "workerinput"):  # what one process counts is only a part
        return
    kinds = sorted({kind for kind, _ in COUNTS})
    fields = {kind: {what: n for (of, what), n in sorted(COUNTS.items()) if of == kind} for kind in kinds}
    cases = sum(n for (kind, _), n in COUNTS.items() if not kind.startswith(("honest", "memory")))
    terminalreporter.section(f"fuzz: {cases} cases")
    for kind, result in fields.items():
        terminalreporter.line(f"{kind}: " + ", ".join(f"{n} {what}" for what, n in result.items()))
    if KEPT and not exitstatus:
        figures = {f"{kind}_{what}".replace(".", "_"): float(n) for (kind, what), n in sorted(COUNTS.items())}
        figures["honest_wrong"] = sum(n for of, n in figures.items() if of.startswith("honest") and "wrong" in of)
        write(
            "fuzz",
            {"cases": float(cases), "minutes": (time.monotonic() - CONDITIONS.began_s) / 60} | figures,
            CONDITIONS,
        )
