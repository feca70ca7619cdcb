"""Counts of what came of each case, told at the end; `make fuzz` also keeps them."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.served import Served, rss_mib

COUNTS: Counter[tuple[str, str]] = Counter()
RESULTS = os.environ.get("ISOBATCH_FUZZ_RESULTS")
MOST_GROWTH_MIB = 64


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """What is attacked. Before it goes: the honest client was right, was not kept waiting, and memory did not grow."""
    served = Served()
    try:
        yield served
    finally:
        served.close()
    COUNTS["honest", "right"], COUNTS["honest", "wrong"] = served.honest - served.wrong, served.wrong
    COUNTS["honest", "worst_ms"] = round(1e3 * served.worst_s)


@pytest.fixture(scope="session")
def counts() -> Counter[tuple[str, str]]:
    return COUNTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not COUNTS:
        return
    kinds = sorted({kind for kind, _ in COUNTS})
    told = {kind: {what: n for (of, what), n in sorted(COUNTS.items()) if of == kind} for kind in kinds}
    cases = sum(n for (kind, _), n in COUNTS.items() if kind not in ("honest", "memory"))
    terminalreporter.section(f"fuzz: {cases} cases")
    for kind, found in told.items():
        terminalreporter.line(f"{kind}: " + ", ".join(f"{n} {what}" for what, n in found.items()))
    if RESULTS:
        whole = {"cases": cases, "rss_mib": round(rss_mib()), "by_kind": told}
        Path(RESULTS).write_text(json.dumps(whole, indent=1) + "\n")
