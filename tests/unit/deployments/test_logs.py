"""Repeated log lines are limited, and the next one has their number."""

import json
import logging
from collections.abc import Iterator

import pytest

from isobatch.cluster.controller.service import _log
from isobatch.deployments import serve_process
from isobatch.deployments.config import AppConfig
from isobatch.deployments.serve_process import (
    LINES_PER_KIND,
    OWN_LOGGERS,
    PERIOD_S,
    SERVE_LOGGER,
    RateLimit,
    join_serves_log,
    process_options,
)
from tests.helpers.fluid_application import MEDIUM, Fluid, batches, control_loop, first_plan, question, run


class Lines(logging.Handler):
    """Stands in for the handlers of Serve's log."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.records.append(record)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """The lines in the log of a Serve replica; afterwards all loggers are restored."""
    monkeypatch.setattr(serve_process, "inside_replica", lambda: True)
    loggers = [logging.getLogger(name) for name in (*OWN_LOGGERS, *serve_process.LIBRARY_LOGGERS, SERVE_LOGGER)]
    before = [(each.handlers[:], each.propagate, each.level) for each in loggers]
    made = Lines()
    loggers[-1].handlers = [made]
    join_serves_log()
    yield made
    for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


def test_repeated_lines_are_counted() -> None:
    now_s = 0.0
    limit = RateLimit(lambda: now_s)

    def passes(sentence: str, *values: object) -> str | None:
        record = logging.LogRecord("isobatch.deployments.front", logging.WARNING, "", 0, sentence, values, None)
        return record.getMessage() if limit.filter(record) else None

    assert [bool(passes("launch %d failed", number)) for number in range(1000)] == [True] * LINES_PER_KIND + [
        False
    ] * 995
    assert passes("something else") == "something else"
    now_s = PERIOD_S
    assert passes("launch %d failed", 7) == "launch 7 failed (and 995 like it in 60 s)"
    now_s = 2 * PERIOD_S
    assert passes("launch %d failed", 8) == "launch 8 failed"


def test_lines_of_all_modules_go_to_serves_log_once(lines: Lines) -> None:
    join_serves_log()  # again, as by another deployment in the same process
    for number in range(100):
        logging.getLogger("isobatch.deployments.front.service").warning("inputs could not be encoded: %d", number)
    logging.getLogger("isobatch.cluster.controller.control_loop").warning("the controller could not look")
    assert len(lines.said) == LINES_PER_KIND + 1
    assert lines.said[-1] == "the controller could not look"


def test_a_collector_that_refuses_spans_is_logged(lines: Lines) -> None:
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").error("Failed to export %s", "spans")
    assert lines.said == ["Failed to export spans"]


def test_serve_gets_the_configured_format() -> None:
    options = process_options(AppConfig(log_format="json").log_format, 1.0)
    assert options["logging_config"]["encoding"] == "JSON"
    loud = process_options("text", 1.0, quiet=False)["logging_config"]
    assert loud == {"enable_access_log": False, "encoding": "TEXT"}


def test_every_decision_is_one_line_with_its_figures(lines: Lines) -> None:
    logging.getLogger(SERVE_LOGGER).setLevel(logging.INFO)
    problem = question(MEDIUM)
    application = Fluid(problem, batches(first_plan(problem), 4))
    loop = control_loop(application)
    loop.report = lambda event: _log("toy", event)
    run(application, loop, 400)
    assert len(lines.said) == sum(loop.decided.values()) >= 2
    assert lines.said[0].startswith("toy: rolling out: ")
    assert "\n" not in "".join(lines.said)
    figures = lines.records[0].decision  # type: ignore[attr-defined]
    assert json.loads(json.dumps(figures))["after"].startswith("blocks")
    assert {"number", "at_s", "what", "before", "gain_promised"} <= figures.keys()
