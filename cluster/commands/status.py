"""`isobatch status`: shows the state and the decisions of an application's controller, and controls it by hand.

A picture of the running application shows the same as the page at `/`, from the same `/stats`. With earlier statistics,
it shows what happened since.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Annotated, Any
from urllib.error import HTTPError

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from isobatch.cluster.client import json_at, stats_at
from isobatch.cluster.commands import KeyVariable, key_headers, number_text, server_at
from isobatch.profiles.agreement import Agreement
from isobatch.profiles.devices import as_text
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile, carried

PATH = "/controller"  # the default route prefix of the controller's application
NO_CONTROLLER = "none: the plan stays as it is"
SMALLEST_SHARE = 0.0005  # a smaller share would be shown as 0.0 %
PATIENCE_S = 10.0
LONG_PATIENCE_S = 600.0  # for what waits until a roll-out has ended, in which replicas may start
WATCH_EVERY_S = 2.0
BAR_WIDTH = 24  # characters
# With fewer inputs in time than this share, and more late or refused ones than this number, these are shown.
MOST_IN_TIME, MANY_LATE = 0.9, 20
LEAST_ANSWERS = 20  # with fewer, survival since the earlier statistics is not shown
HEIGHTS = "▁▂▃▄▅▆▇█"
_RETRIED = (500, 502, 503, 504)  # statuses after which the same request may be answered
_STARTING = (502, 503, 504)  # of a server that has not answered yet, but will
Stats = dict[str, Any]
Shown = Group | str  # tables, or JSON
_Look = Callable[[Stats | None], tuple[Shown, Stats | None]]


class _StatusError(UserError):
    """A server answers with the status of an error."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def status(
    url: Annotated[
        str, typer.Argument(help="Address of the application, or of a fleet's arbiter.")
    ] = "http://127.0.0.1:8000",
    watch: Annotated[bool, "Update the display until Ctrl-C."] = False,
    pause: Annotated[bool, "Let the controller change nothing from now on."] = False,
    resume: Annotated[bool, "Let the controller change plans again."] = False,
    force: Annotated[bool, "Plan now, and apply the best plan, whatever it gains."] = False,
    dry_run: Annotated[bool, "Show what the controller would decide now, and apply nothing."] = False,
    path: Annotated[str, "Route prefix of the controller's application."] = PATH,
    api_key_variable: KeyVariable = None,
    as_json: Annotated[bool, "Print JSON, for other programs."] = False,
) -> None:
    """Show the running plan, how full its launches are, promised and current goodput, the forecast and decisions.

    Example: [bold]isobatch status http://127.0.0.1:8000 --watch[/]
    """
    actions = {"pause": pause, "resume": resume, "force": force, "would": dry_run}
    chosen = [name for name, wanted in actions.items() if wanted]
    if len(chosen) > 1 or (chosen and watch):
        raise UserError("--pause, --resume, --force, --dry-run and --watch: give one at a time")
    server, console, path = server_at(url), Console(markup=False), f"/{path.strip('/')}".rstrip("/")
    base = server + path
    if chosen:
        answer = ask(f"{base}/{chosen[0]}", api_key_variable, chosen[0] != "would", LONG_PATIENCE_S)
        if answer is None:
            raise _no_controller_error(base, _stats(server, api_key_variable))
        with _as_isobatch(server):
            console.print_json(json.dumps(answer)) if as_json else console.print(_sentence(answer))
        return
    look = partial(_look, server, path, api_key_variable, as_json)
    if watch:
        watched(look, console, Console(stderr=True) if as_json else console, time.sleep)
    else:
        _show(console, look(None)[0])


def _look(
    server: str, path: str, variable: str | None, as_json: bool, last: Stats | None
) -> tuple[Shown, Stats | None]:
    """What to show now, and the statistics with which the next look compares. `last`: those of the look before."""
    base = server + path
    answer = ask(f"{base}/status", variable)
    stats = None if as_json and answer else _stats(server, variable)
    if not answer and not stats:
        answer = ask(f"{server}/status", variable)  # the address is that of an arbiter, or of a controller itself
    if answer is None and (as_json or stats is None):
        raise _no_controller_error(base, stats)
    if as_json:
        return json.dumps(answer), stats
    is_fleet = answer is not None and "applications" in answer
    with _as_isobatch(server):
        return (fleet_tables(answer, time.time()) if is_fleet else tables(answer, stats, last)), stats


@contextmanager
def _as_isobatch(server: str) -> Iterator[None]:
    """Raise UserError if an answer is JSON of another form, as of another program's server."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{server} does not answer as isobatch does: {error!r}") from error


def watched(look: _Look, console: Console, notes: Console, wait: Callable[[float], None]) -> None:
    """Look again and again. Once a server has answered, a look that fails is a line in `notes`: it may restart."""
    shown: Shown | None = None
    last: Stats | None = None
    answers = False
    while True:
        trouble = ""
        try:
            shown, last = look(last)
            answers = True
        except UserError as error:
            code = error.code if isinstance(error, _StatusError) else 0  # 0: no answer
            answers = answers or code in _STARTING
            if not answers or (code and code not in _RETRIED):
                raise
            trouble, last = f"{datetime.now():%H:%M:%S}: {error} (the next look is in {WATCH_EVERY_S:g} s)", None
        console.clear()
        if trouble:
            notes.print(Text(trouble, style="red"))
        if shown and (notes is console or not trouble):
            _show(console, shown)
        wait(WATCH_EVERY_S)


def _show(console: Console, shown: Shown) -> None:
    console.print_json(shown) if isinstance(shown, str) else console.print(shown)


def _stats(url: str, variable: str | None) -> Stats | None:
    """The application's statistics; None: it is not at this address, for instance because it has a route prefix."""
    stats = stats_at(url, key_headers(variable))
    return stats if "splits" in stats else None


def ask(url: str, variable: str | None, post: bool = False, patience_s: float = PATIENCE_S) -> Any:
    """The server's JSON answer; None: there is no such path."""
    try:
        return json_at(url, key_headers(variable), method="POST" if post else "GET", patience_s=patience_s)
    except HTTPError as error:
        if error.code == 404:
            return None
        try:
            reason = f"{url}: {json.load(error)['error']}"
        except (ValueError, KeyError, TypeError):
            reason = f"{url} answers {error.code} {error.reason}"
        raise _StatusError(reason, error.code) from None


def _no_controller_error(base: str, stats: Stats | None) -> UserError:
    hint = f"; 'isobatch status' without options shows the figures of {stats['model']}" if stats else ""
    return UserError(
        f"no controller runs at {base}: add isobatch.cluster.controller.app:build to your Serve file{hint}"
    )


def _sentence(answer: dict[str, Any]) -> str:
    if "paused" in answer:
        return "paused: plans stay as they are" if answer["paused"] else "plans change when it is worth it"
    change = f"\n  from {answer['before']}\n  to   {answer['after']}" if answer["after"] else ""
    return f"{answer['what']}: {answer['why']}{change}"


def tables(answer: dict[str, Any] | None, stats: Stats | None = None, last: Stats | None = None) -> Group:
    """The controller's state as tables, with a picture of the running plan from the fronts' statistics.

    `last` are the previous statistics. For an application without a controller, only the statistics are shown.
    """
    is_decoder = stats is not None and "tokens_per_s" in stats
    if answer is None:
        assert stats, "This is a bug: either the controller or the application has answered."
        if is_decoder:
            return Group(texts_table(stats, NO_CONTROLLER))
        return Group(_without_controller(stats), picture(stats, last, ()))
    served = ExitProfile(tuple(answer["survival"])).survival_with(answer["plan"]["ramps"])
    expected = carried(served, answer.get("full_share", 0.0))  # of all answers, as the fronts count them
    drawn = [texts_table(stats) if is_decoder else picture(stats, last, expected)] if stats else []
    return Group(_now(answer, stats), *drawn, _survival(answer), _events(answer["events"], answer["now_s"]))


def fleet_tables(answer: dict[str, Any], now_s: float) -> Group:
    """The devices and the goodput of each application of a fleet, and why devices moved, the latest first."""
    table = Table("application", "devices", "in time", "arrive", "expected", "", title="fleet", title_justify="left")
    for name, each in answer["applications"].items():
        per_s = (number_text(each[figure]) for figure in ("goodput_per_s", "arrivals_per_s", "expected_per_s"))
        table.add_row(name, as_text(each["devices"]) or "none", *per_s, each["state"])
    decided = Table("", "why", title="last decisions", title_justify="left")
    for why, run in groupby(answer["decisions"][::-1], key=lambda each: str(each["why"])):
        decided.add_row(_at(next(run)["at_s"], now_s), why)
    return Group(table, decided)


def _without_controller(stats: Stats) -> Table:
    table = Table("", "", title=stats["model"], show_header=False, title_justify="left")
    table.add_row("plan", stats["plan"] or "none: the whole network runs in the front")
    table.add_row("exits", stats["promise"])
    if stats.get("agreement"):
        table.add_row("audits", stats["agreement"])
    table.add_row("controller", NO_CONTROLLER)
    return table


def _now(answer: dict[str, Any], stats: Stats | None) -> Table:
    plan, window, forecast = answer["plan"], answer["window"], answer["forecast"]
    table = Table("", "", title=answer["application"], show_header=False, title_justify="left")
    table.add_row("plan", plan["summary"])
    table.add_row("devices", ", ".join(f"{count} {kind}" for kind, count in answer["devices"].items()))
    if answer.get("asked"):
        table.add_row("to come", answer["asked"])
    promised = f"{number_text(plan['promised_per_s'])} in time per second"
    if p99_ms := plan.get("simulated_p99_ms"):
        promised += f", simulated p50 {number_text(plan['simulated_p50_ms'])} ms, p99 {number_text(p99_ms)} ms"
    table.add_row("promised", promised)
    table.add_row(
        "now", f"{number_text(window['goodput_per_s'])} in time of {number_text(window['arrivals_per_s'])} per second, "
        f"p50 {number_text(window['p50_ms'])} ms, p99 {number_text(window['p99_ms'])} ms",
    )  # fmt: skip
    table.add_row("exits", answer["promise"])
    if answer.get("agreement"):
        table.add_row("audits", answer["agreement"])
        if total := (stats or {}).get("audits", {}).get("agreement"):
            table.add_row("since the start", str(Agreement(**total)))
    if window.get("length"):
        texts = f"texts have {number_text(window['tokens_per_text'])} on average now"
        if forecast and forecast["tokens_per_text"]:
            texts += f", {number_text(forecast['tokens_per_text'])} are expected"
        table.add_row("counted in tokens", f"an input is {window['length']} tokens; {texts}")
    table.add_row("sustains now", _sustained(plan, window))
    if forecast:
        low, high = number_text(forecast["arrivals_low_per_s"]), number_text(forecast["arrivals_high_per_s"])
        table.add_row("arrivals forecast", f"{number_text(forecast['arrivals_per_s'])} ({low} .. {high}) per second")
        table.add_row("forecast by", forecast["method"])
    if (full_share := answer.get("full_share", 0.0)) > SMALLEST_SHARE:
        table.add_row("asked in full", f"{full_share:.1%} of the inputs; plans carry them to the end")
    table.add_row("tables corrected", _corrections(answer["corrections"]))
    paused = ", paused: nothing is changed" if answer["paused"] else ""
    table.add_row("next decision", f"in {window['ends_in_s']:.0f} s{paused}")
    if answer["trouble"]:
        table.add_row(Text("trouble", "red"), answer["trouble"])
    return table


def _sustained(plan: dict[str, Any], window: dict[str, Any]) -> str:
    """The estimated goodput of a plan. Launches do not show why inputs are late while devices are idle."""
    per_s, arrive_per_s, in_time_per_s = plan["sustains_per_s"], window["arrivals_per_s"], window["goodput_per_s"]
    why = f": {plan['shortfall']}" if plan.get("shortfall") else ""
    late = window["seconds"] * (arrive_per_s - in_time_per_s)
    if in_time_per_s < MOST_IN_TIME * min(arrive_per_s, per_s) and late > MANY_LATE:
        seen = f"{number_text(in_time_per_s)} of {number_text(arrive_per_s)} per second"
        return f"{seen}; by its launches, it would be {number_text(per_s)}{why}"
    return f"{number_text(per_s)} per second{why}"


def _survival(answer: dict[str, Any]) -> Table:
    """The forecast survival: the share of inputs that enter each block."""
    forecast = answer["forecast"]
    table = Table("block", "enter it", "between", "ramp behind it", title="survival", title_justify="left")
    for block, share in enumerate(answer["survival"]):
        between = f"{forecast['low'][block]:.1%} .. {forecast['high'][block]:.1%}" if forecast else ""
        table.add_row(str(block), f"{share:.1%}", between, "open" if block in answer["plan"]["ramps"] else "")
    return table


def _events(events: list[dict[str, Any]], now_s: float) -> Table:
    """The decisions, the latest first. Equal decisions in a row, as in idle times, are shown once."""
    table = Table("", "", "why", "promised", "seen", title="last decisions", title_justify="left")
    if not events:
        table.add_row("", "", "none yet: the first comes after a whole window")
    for _, run in groupby(events[::-1], key=lambda event: (event["what"], event["why"], event["before"])):
        event, *repeated = run
        gains = (event["gain_promised"], event["gain_seen"])
        why = event["why"] + (f"\nfrom {event['before']}\nto {event['after']}" if event["after"] else "")
        why += f"\n({len(repeated)} times more since {_at(repeated[-1]['at_s'], now_s)})" if repeated else ""
        table.add_row(
            _at(event["at_s"], now_s), event["what"], why, *("" if gain is None else f"{gain:+.1%}" for gain in gains)
        )
    return table


def _at(at_s: float, now_s: float) -> str:
    at, now = datetime.fromtimestamp(at_s), datetime.fromtimestamp(now_s)
    return f"{at:%H:%M:%S}" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S}"


def _corrections(corrections: dict[str, dict[str, float]]) -> str:
    """
    >>> _corrections({"v100": {"0-3": 1.12}}), _corrections({})
    ('v100 blocks 0-3 x1.12', 'not at all')
    """
    parts = [f"{kind} blocks {blocks} x{by:g}" for kind, each in corrections.items() for blocks, by in each.items()]
    return ", ".join(parts) or "not at all"


def picture(stats: Stats, earlier: Stats | None, forecast: Sequence[float]) -> Group:
    """The splits with their devices and the fill of their launches, then the survival beside its forecast."""
    return Group(_splits(stats, earlier), _survivors(survival(stats, earlier), forecast))


def _splits(stats: Stats, earlier: Stats | None) -> Table:
    from isobatch.optimizer.plan import blocks_text

    table = Table("split", "devices", "batch", "filled", "", "waiting", title="launches", title_justify="left")
    for split in stats["splits"]:
        first, end = split["blocks"]
        blocks = f"block{'s' if end - first > 1 else ''} {blocks_text(first, end - 1)}"
        kind = split["group"].rpartition("-")[0] or split["group"]
        share = fill(split, earlier)
        filled = ("no launches", "") if share is None else (Text(bar(share), "blue"), f"{share:.0%}")
        table.add_row(blocks, f"{split['replicas']} x {kind}", str(split["batch"]), *filled, f"{split['waiting']:,}")
    return table


def _survivors(current: Sequence[float], forecast: Sequence[float]) -> Table:
    table = Table("", "", "", title="inputs that reach each block", title_justify="left", show_header=False)
    for name, shares in (("lately", current), ("forecast", forecast)):
        if shares:
            table.add_row(name, Text(sparkline(shares), "blue"), f"{shares[-1]:.0%} reach the last of {len(shares)}")
    return table


def texts_table(stats: Stats, controller: str = "") -> Table:
    """The figures where texts are written: no picture, because its launches contain tokens of all depths.

    `controller`: the text of a row on the controller, if any.
    """
    table = Table("", "", title=stats["model"], show_header=False, title_justify="left")
    tokens = {int(block): count for block, count in stats["exits"].items()}
    written = sum(tokens.values())
    depth = sum((block + 1) * count for block, count in tokens.items()) / written if written else 0.0
    pages = stats["pages"]
    launches = [f"split {each['split']} {bar(each['fill'])} {each['fill']:.0%}" for each in stats["splits"]]
    table.add_row("requests", ", ".join(f"{count:,} {outcome}" for outcome, count in stats["requests"].items()))
    table.add_row("replicas", f"{stats['replicas']:,}")
    table.add_row("tokens", f"{written:,}, {depth:.1f} of {len(tokens)} blocks each, {stats['tokens_per_s']:,.0f}/s")
    table.add_row(
        "sequences", f"{stats['residents']:,} resident, {stats['waiting']:,} wait, {stats['preempted']:,} preempted"
    )
    table.add_row("pages", f"{pages['free']:,} of {pages['of']:,} free")
    table.add_row("launches", "\n".join(launches) or "none yet")
    if controller:
        table.add_row("controller", controller)
    return table


def fill(split: Stats, earlier: Stats | None) -> float | None:
    """How full the launches of a split were since the earlier statistics; None: there were no launches.

    >>> split = {"group": "v100-0", "blocks": [0, 3], "launches": 30, "fill": 0.9}
    >>> fill(split, None), fill(split, {"splits": [split | {"launches": 20, "fill": 0.85}]})
    (0.9, 1.0)
    """
    same = [each for each in (earlier or {"splits": []})["splits"] if _place(each) == _place(split)]
    launches, filled = (same[0]["launches"], same[0]["fill"]) if same else (0, 0.0)
    since = split["launches"] - launches
    if since <= 0:
        return None
    return float(min(1.0, max(0.0, (split["fill"] * split["launches"] - filled * launches) / since)))


def _place(split: Stats) -> tuple[str, tuple[int, ...]]:
    return split["group"], tuple(split["blocks"])


def survival(stats: Stats, earlier: Stats | None) -> list[float]:
    """The share that reached each block since the earlier statistics, or since the start if too few were answered, or
    if a front that has ended has taken its counts along.

    >>> now = {"exits": {"0": 30, "1": 10}, "survival": [1.0, 0.5]}
    >>> survival(now, {"exits": {"0": 0, "1": 0}}), survival(now, {"exits": {"0": 0, "1": 15}})
    ([1.0, 0.25], [1.0, 0.5])
    """
    left = [count - (earlier or {"exits": {}})["exits"].get(block, 0) for block, count in stats["exits"].items()]
    total = sum(left)
    if total < LEAST_ANSWERS or min(left) < 0:
        return list(stats["survival"])
    return [sum(left[block:]) / total for block in range(len(left))]


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """
    >>> bar(0.5, 8)
    '████░░░░'
    """
    full = round(share * width)
    return "█" * full + "░" * (width - full)


def sparkline(shares: Sequence[float]) -> str:
    """
    >>> sparkline([1.0, 0.6, 0.0])
    '█▅▁'
    """
    return "".join(HEIGHTS[min(len(HEIGHTS) - 1, int(share * len(HEIGHTS)))] for share in shares)
