"""The goodput that a plan loses when survival differs from the forecast (E3, figure 22)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem

ERRORS = (-0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0)  # forecast errors to report, as in `ForecastError.error`


@dataclass(frozen=True)
class ForecastError:
    """A wrong forecast. `error`: the share by which fewer inputs leave than forecast (negative: more)."""

    error: float
    goodput_per_s: float  # of the plan for the forecast
    best_per_s: float  # of the best plan for the true survival
    latency_s: float
    within_slo: bool

    @property
    def lost(self) -> float:
        """The share of the goodput that is lost by the wrong forecast."""
        return 1 - self.goodput_per_s / self.best_per_s if self.best_per_s else 0.0


def surprised(survival: Iterable[float], error: float) -> tuple[float, ...]:
    """The survival when the share `error` of the inputs that should leave stay.

    >>> surprised((1.0, 0.5), 0.5), surprised((1.0, 0.5), -0.5)
    ((1.0, 0.75), (1.0, 0.25))
    """
    return tuple(max(0.0, 1 - (1 - error) * (1 - share)) for share in survival)


def sensitivity(plan: Plan, facts: Problem, objective: Objective) -> tuple[ForecastError, ...]:
    """The plan under wrong forecasts, compared with the best plan for the true survival on the same devices."""
    used = tuple(replace(facts.device(kind), count=count) for kind, count in plan.devices().items())
    same_devices = replace(facts, pessimistic=None).with_devices(used)
    return tuple(
        _of_error(plan, same_devices.surviving(surprised(facts.survival, error)), objective.for_most_goodput, error)
        for error in ERRORS
    )


def _of_error(plan: Plan, truth: Problem, objective: Objective, error: float) -> ForecastError:
    score, best = evaluate(plan, truth, objective), side_by_side(truth, objective)
    most = evaluate(best, truth, objective).goodput_per_s if best else 0.0
    within = score.latency_s <= objective.budget_s * (1 + 1e-9)
    return ForecastError(error, score.goodput_per_s, most, score.latency_s, within)
