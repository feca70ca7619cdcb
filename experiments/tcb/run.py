"""Claim: TCB's order of inputs answers more texts in time in our launches, but long texts get less than their share.

The paper's systems run on our dispatcher and event loop, in virtual time, on one V100 by its datasheet. Its figures are
the highest throughput of any rate, with texts that are launched before their deadline; all other figures count texts
that are answered by then. The controls are padding, sorting by length, and our own order with promises and without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.tcb import engines
from experiments.tcb.engines import Engine, OneDevice, seconds
from experiments.tcb.schedulers import (
    EARLIEST,
    FIRST,
    SHORTEST,
    Arrival,
    DeadlineDispatcher,
    OrderedDispatcher,
    first_come,
    in_rows,
)
from isobatch.cluster.load.workloads import Floats, Ints, arrivals
from isobatch.cluster.simulator.event_loop import Departure, EventLoop
from isobatch.deployments.dispatch.batching import QueueOrder
from isobatch.deployments.dispatch.dispatcher import Dispatcher
from isobatch.deployments.dispatch.messages import Ending, Launch, Limits, Place
from isobatch.deployments.dispatch.queue_orders import das
from isobatch.deployments.dispatch.route import Route, Stage

console = Console(stderr=True)

SHORTEST_TEXT, LONGEST_TEXT, MEAN, VARIANCE = 3, 100, 20, 20  # tokens, as in the paper's section 6
WIDE = 100  # the paper's other variance
ROWS = 64  # rows of a batch
PATIENCE_S = (1.0, 4.0)  # from a text's arrival to its deadline, uniform; the paper does not state it
RATES = (100, 150, 200, 250, 300, 350, 400, 450, 500, 600, 800)
SLOTS = (2, 4, 5, 8, 10)  # of a row
OVERLOADS = (1.5, 2.0, 3.0)  # over our highest rate of texts in time


@dataclass(frozen=True)
class System:
    """A layout of texts, and an order of inputs; None: the dispatcher's own order."""

    engine: Engine
    order: QueueOrder | None = None
    launch_s: float = 0.0  # texts are dropped that would be late after a launch of this time

    def dispatcher(self) -> Dispatcher:
        times = tuple(seconds(size, MEAN) for size in range(1, ROWS + 1))
        stage = Stage(0, 1, ROWS, "v100", times, length=MEAN, least_s=seconds(0.05, MEAN))
        route, groups = Route((stage,)), {"v100": ["v100/0"]}
        if self.order is None:
            return DeadlineDispatcher(route, groups, Limits(max_inside=100_000))
        return OrderedDispatcher(route, groups, Limits(max_inside=100_000, ahead=0), self.order, self.launch_s)


PADDED_DAS = in_rows(das, ROWS, LONGEST_TEXT, most=ROWS)
SYSTEMS: Mapping[str, System] = {
    "padded to the longest, DAS": System(engines.padded, PADDED_DAS),
    "padded to 100, DAS": System(engines.padded_to(LONGEST_TEXT), PADDED_DAS),
    "sorted by length, DAS": System(engines.by_length, PADDED_DAS),
    "rows, DAS": System(engines.in_rows(LONGEST_TEXT), in_rows(das, ROWS, LONGEST_TEXT)),
    "padded to the longest, first come": System(engines.padded, first_come(ROWS)),
    "padded to 100, first come": System(engines.padded_to(LONGEST_TEXT), first_come(ROWS)),
    "sorted by length, first come": System(engines.by_length, first_come(ROWS)),
    "rows, first come": System(engines.in_rows(LONGEST_TEXT), in_rows(FIRST, ROWS, LONGEST_TEXT)),
    "rows, shortest first": System(engines.in_rows(LONGEST_TEXT), in_rows(SHORTEST, ROWS, LONGEST_TEXT)),
    "isobatch": System(engines.packed(MEAN)),
    "isobatch's launches, DAS": System(engines.packed(MEAN), das, seconds(ROWS, MEAN)),
    "isobatch's launches, earliest deadline": System(engines.packed(MEAN), EARLIEST, seconds(ROWS, MEAN)),
}


@dataclass
class Counted:
    """The tokens of launched texts and of texts in time, while texts arrive."""

    until_s: float
    launched: list[int] = field(default_factory=list)
    in_time: list[int] = field(default_factory=list)

    def refuse(self, at_s: float, weight: int) -> None: ...

    def lose(self, ending: Ending, at_s: float) -> None: ...

    def audit(self, block: int, agrees: bool) -> None: ...

    def launch(self, launch: Launch, kind: str, took_s: float) -> None: ...

    def answer(self, now_s: float, launch: Launch, departure: Departure, ends_s: Sequence[float] | None) -> None:
        if now_s <= self.until_s:
            self.launched += launch.weights
        pairs = zip(launch.weights, launch.places, strict=True)
        self.in_time += [weight for weight, place in pairs if now_s <= place.payload.deadline_s + 1e-9]


@dataclass(frozen=True)
class Outcomes:
    """A run over these seconds: the tokens of all texts, of those launched, and of those answered in time."""

    seconds: float
    arrived: Ints
    launched: Ints
    in_time: Ints

    @property
    def launched_per_s(self) -> float:
        return len(self.launched) / self.seconds

    @property
    def in_time_per_s(self) -> float:
        return len(self.in_time) / self.seconds

    @property
    def utility_per_s(self) -> float:
        """The utility of launched texts, as in the paper."""
        return float((1 / self.launched).sum() / self.seconds)

    @property
    def least_share(self) -> float:
        """The share in time of the worst quarter of lengths, over that of all texts."""
        edges = np.quantile(self.arrived, (0.25, 0.5, 0.75))
        arrived, in_time = (
            np.bincount(np.searchsorted(edges, each), minlength=4) for each in (self.arrived, self.in_time)
        )
        return float((in_time / arrived).min() / (len(self.in_time) / len(self.arrived)))


def lengths(count: int, variance: float, random: np.random.Generator) -> Ints:
    """Normally distributed lengths, drawn again if they are out of range."""
    result = np.empty(0, np.int64)
    while len(result) < count:
        drawn = np.round(random.normal(MEAN, variance**0.5, count)).astype(np.int64)
        result = np.append(result, drawn[(drawn >= SHORTEST_TEXT) & (drawn <= LONGEST_TEXT)])
    return result[:count]


def played(system: System, rate: float, duration_s: float, variance: float = VARIANCE) -> Outcomes:
    """Run Poisson arrivals until the last text has ended."""
    times_s: Floats = arrivals("poisson", rate, duration_s, seed=1)
    random = np.random.default_rng(2)
    tokens = lengths(len(times_s), variance, random)
    deadlines_s = times_s + random.uniform(*PATIENCE_S, len(times_s))
    counted = Counted(duration_s)
    loop = EventLoop(system.dispatcher(), OneDevice(system.engine), counted, slo_s=inf)
    each = zip(times_s.tolist(), deadlines_s.tolist(), tokens.tolist(), strict=True)
    loop.arrive(
        (at_s, Place(Arrival(at_s, until_s), number), weight, False)
        for number, (at_s, until_s, weight) in enumerate(each)
    )
    loop.run_until(inf)
    return Outcomes(duration_s, tokens, np.array(counted.launched, np.int64), np.array(counted.in_time, np.int64))


def measure(duration_s: int = 30) -> dict[str, float]:
    most = {name: _most(SYSTEMS[name], duration_s, VARIANCE) for name in SYSTEMS if "isobatch's" not in name}
    rows, by_length = (_most(SYSTEMS[f"{each}, first come"], duration_s, WIDE) for each in ("rows", "sorted by length"))
    figures = _ratios(most) | _slots()
    figures["rows_over_sorted_by_length_first_come_variance_100"] = rows[0] / by_length[0]
    figures |= _adopt(duration_s, VARIANCE) | _adopt(duration_s, WIDE, "_variance_100")
    _print_most(most)
    return figures


def _most(system: System, duration_s: int, variance: float) -> tuple[float, float]:
    """The highest texts per second, and the highest utility per second, over all rates."""
    runs = [played(system, rate, duration_s, variance) for rate in RATES]
    return max(run.launched_per_s for run in runs), max(run.utility_per_s for run in runs)


def _ratios(most: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    figures = {}
    for order, name in (("das", "DAS"), ("first_come", "first come")):
        rows = most[f"rows, {name}"]
        for other in ("padded to the longest", "padded to 100", "sorted by length"):
            figures[f"rows_over_{other.replace(' ', '_')}_{order}"] = rows[0] / most[f"{other}, {name}"][0]
    for other in ("padded to the longest", "sorted by length"):
        figures[f"isobatch_over_{other.replace(' ', '_')}_das"] = most["isobatch"][0] / most[f"{other}, DAS"][0]
    figures["utility_das_over_shortest_first"] = most["rows, DAS"][1] / most["rows, shortest first"][1]
    return figures


def _slots() -> dict[str, float]:
    """The largest gain of slots in rows of 400 tokens, by the attention that they save."""
    return {
        f"slots_speedup_{rows}_rows": max(seconds(rows, 400) / seconds(rows * cut, 400 // cut) for cut in SLOTS)
        for rows in (10, 32)
    }


def _adopt(duration_s: int, variance: float, name: str = "") -> dict[str, float]:
    """DAS's order in our launches over ours: texts in time, and the share of the worst quarter of lengths.

    DAS makes no promises. The control is our own order without promises, which shows the gain of that alone.
    """
    best_per_s = max(played(SYSTEMS["isobatch"], rate, duration_s, variance).in_time_per_s for rate in RATES)
    figures = {}
    for times in OVERLOADS:
        ours, das_, earliest = (
            played(SYSTEMS[each], times * best_per_s, duration_s, variance)
            for each in ("isobatch", "isobatch's launches, DAS", "isobatch's launches, earliest deadline")
        )
        at = f"{times:g}x{name}".replace(".", "_")
        figures[f"das_gain_{at}"] = das_.in_time_per_s / ours.in_time_per_s - 1
        figures[f"das_least_quarter_{at}"] = das_.least_share
        figures[f"no_promises_gain_{at}"] = earliest.in_time_per_s / ours.in_time_per_s - 1
    return figures


def _print_most(most: Mapping[str, tuple[float, float]]) -> None:
    table = Table("system", "texts a second", "utility a second", title="at the best rate of each")
    for name, (per_s, utility_per_s) in most.items():
        table.add_row(name, f"{per_s:,.0f}", f"{utility_per_s:,.2f}")
    console.print(table)
