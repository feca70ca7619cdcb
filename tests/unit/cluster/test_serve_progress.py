"""How far a start is, on a terminal and in a log, and what is said of what runs."""

from io import StringIO

import pytest
from rich.console import Console

from isobatch.cluster.commands.serve import progress_printer
from isobatch.cluster.serving import applications
from isobatch.profiles.errors import UserError

STEPS = ["Starting Ray", "Starting isobatch 0/1", "Starting isobatch 0/1", "Starting isobatch 1/1"]


def test_a_log_has_a_line_for_everything_that_is_new() -> None:
    log = list[str]()
    show_progress = progress_printer(Console(file=StringIO(), force_terminal=False), lambda what: None, log.append)
    for step in STEPS:
        show_progress(step)
    assert log == ["Starting Ray", "Starting isobatch 0/1", "Starting isobatch 1/1"]


def test_a_terminal_has_one_line_that_changes() -> None:
    shown, log = list[str](), list[str]()
    show_progress = progress_printer(Console(file=StringIO(), force_terminal=True), shown.append, log.append)
    for step in STEPS:
        show_progress(step)
    assert shown == STEPS
    assert log == []


def test_a_start_that_takes_too_long_says_what_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "_applications", dict)
    with pytest.raises(
        UserError, match=r"not ready after 0 s \(isobatch: NOT_STARTED\).* need more time \(--patience-s\)"
    ):
        applications._wait_until_running(["isobatch"], [], 0.0, lambda what: None)
