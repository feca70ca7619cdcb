"""How far a start is, on a terminal and in a log."""

from io import StringIO

from rich.console import Console

from cluster.commands.serve import teller

STEPS = ["Starting Ray", "Starting isobatch 0/1", "Starting isobatch 0/1", "Starting isobatch 1/1"]


def test_a_log_has_a_line_for_everything_that_is_new() -> None:
    log = list[str]()
    tell = teller(Console(file=StringIO(), force_terminal=False), lambda what: None, log.append)
    for step in STEPS:
        tell(step)
    assert log == ["Starting Ray", "Starting isobatch 0/1", "Starting isobatch 1/1"]


def test_a_terminal_has_one_line_that_changes() -> None:
    shown, log = list[str](), list[str]()
    tell = teller(Console(file=StringIO(), force_terminal=True), shown.append, log.append)
    for step in STEPS:
        tell(step)
    assert shown == STEPS
    assert log == []
