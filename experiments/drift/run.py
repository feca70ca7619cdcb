"""Claim: when inputs change, the controller is within two windows as good as a plan made for the new mix."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress, track

from experiments.drift.plot import draw
from experiments.drift.suite import SUITE, Suite
from experiments.shared.gains import baseline_plan
from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.rehearsal import Replanned, replan
from isobatch.cluster.load.workloads import Floats, Ints, arrivals
from isobatch.cluster.simulator.report import Report
from isobatch.cluster.simulator.simulation import World, simulate
from isobatch.optimizer import Plan, Problem
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, NO_EXITS

PICTURE = Path(__file__).parents[2] / "docs" / "drift.png"
STEADY_S = 20.0  # enough for a plan that stays, since its goodput is steady while the mix is
WINDOWS = 2  # after which the controller is compared with the best plan


def measure(suite: Suite = SUITE, picture: Path | None = PICTURE) -> dict[str, float]:
    phases = [suite.question.facts(suite.survival(easy), Corrections()) for easy in suite.easy_shares]
    plans = [suite.best(facts) for facts in phases]
    rates = [suite.offered_per_s(plan, facts) for plan, facts in zip(plans, phases, strict=True)]
    controlled = _controlled(suite, phases[0], plans[0], rates)
    staying = _staying(suite, phases, plans, rates)
    if picture:
        draw(suite, controlled, staying, picture)
    steady = [_settled(controlled.report, suite, phase) for phase in range(len(phases))]
    spent = controlled.spent
    return {
        "adapt_share_after_2_windows": min(
            mine / best for mine, best in zip(steady[1:], staying["best plan"][1:], strict=True)
        ),
        "changes": float(len(controlled.changes)),
        **{
            f"gain_over_{name.replace(' ', '_')}_{easy:.0%}_easy".replace("%", "_percent"): mine / theirs
            for name, per_s in staying.items()
            for easy, mine, theirs in zip(suite.easy_shares, steady, per_s, strict=True)
        },
        "controller_cpu_share": (spent.window_s + spent.look_s) / suite.seconds,
        "ms_per_window": 1e3 * spent.window_s / spent.windows,
        "ms_per_look": 1e3 * spent.look_s / spent.looks,
    }


def _controlled(suite: Suite, facts: Problem, first: Plan, rates: Sequence[float]) -> Replanned:
    world = World(first, facts, suite.slo_s)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("with the controller", total=suite.seconds)
        return replan(
            world, suite.question, _inputs(suite, rates), suite.seconds, patience=Patience(),
            progress=lambda at_s: progress.update(task, completed=at_s),
        )  # fmt: skip


def _inputs(suite: Suite, rates: Sequence[float]) -> Iterator[tuple[Floats, Ints]]:
    for phase, rate in enumerate(rates):
        yield _phase(suite, phase, rate, suite.phase_s)


def _phase(suite: Suite, phase: int, rate: float, seconds: float) -> tuple[Floats, Ints]:
    times_s = suite.starts_s[phase] + arrivals("poisson", rate, seconds, seed=phase)
    return times_s, suite.mix.exit_blocks(times_s, np.random.default_rng(phase))


def _staying(
    suite: Suite, phases: Sequence[Problem], plans: Sequence[Plan], rates: Sequence[float]
) -> Mapping[str, list[float]]:
    """Goodput per second of plans that do not change, by plan, then by mix."""
    objective = suite.question.objective
    systems: dict[str, list[Plan]] = {
        "best plan": list(plans),
        "first plan": [plans[0]] * len(plans),
        "early exit": [baseline_plan(EARLY_EXIT, facts, objective) for facts in phases],
        "no exits": [baseline_plan(NO_EXITS, facts, objective) for facts in phases],
    }
    cases = track(systems.items(), "plans that stay", console=Console(stderr=True), transient=True)
    return {
        name: [_per_s(suite, phase, facts, chosen[phase], rates[phase]) for phase, facts in enumerate(phases)]
        for name, chosen in cases
    }


def _per_s(suite: Suite, phase: int, facts: Problem, plan: Plan, rate: float) -> float:
    """The goodput of one plan, at no more load than it can carry, because some plans break down under overload."""
    times_s, sure_after = _phase(suite, phase, min(rate, suite.offered_per_s(plan, facts)), STEADY_S)
    inputs = [(times_s - suite.starts_s[phase], sure_after)]
    return simulate(World(plan, facts, suite.slo_s), inputs, STEADY_S).goodput_per_s


def _settled(report: Report, suite: Suite, phase: int) -> float:
    """The goodput from two windows after a mix began until it ends."""
    good, each_s = report.tally.good, report.tally.seconds / len(report.tally.good)
    from_s = suite.starts_s[phase] + WINDOWS * Patience().replan_every_s
    first, last = (round(at_s / each_s) for at_s in (from_s, suite.starts_s[phase] + suite.phase_s))
    return float(good[first:last].sum() / ((last - first) * each_s))
