"""The setting of E3's section 5.4: BERT-base on V100s; inputs go from 80:20 easy to hard over 50:50 to 20:80."""

from dataclasses import dataclass, replace

from experiments.planner import networks as shapes
from experiments.planner.settings import Network
from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.optimizer import Objective, Plan, Problem, evaluate
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet
from isobatch.profiles.files import Profile

EASY = Network("easy", shapes.bert_base(), ((0.0, 1.0), (0.34, 0.2), (1.0, 0.05)))
HARD = Network("hard", shapes.bert_base(), ((0.0, 1.0), (0.5, 0.97), (1.0, 0.8)))


@dataclass(frozen=True)
class Suite:
    """Four devices instead of sixteen, which does not change ratios, since splits take turns on every replica.

    `launch_s`: launching the kernels of twelve layers one by one from Python takes 2 ms. With the 0.2 ms of datasheets,
    one plan is within 2 % of the best for every mix, and early exit within 10 %.
    """

    devices: str = "v100=4"
    launch_s: float = 0.002
    slo_s: float = 0.1
    max_batch: int = 16
    easy_shares: tuple[float, ...] = (0.8, 0.5, 0.2)
    load: float = 0.95  # as a share of the promise
    gap: float = 0.01

    @property
    def question(self) -> ClassifierPlanningProblem:
        kinds = fleet(self.devices)
        tables = (datasheet_table(EASY.shape, kind.kind, dtype="float32") for kind in kinds)
        slower = tuple(replace(table, launch_s=self.launch_s) for table in tables)
        objective = Objective(slo_s=self.slo_s, max_batch=self.max_batch)
        return ClassifierPlanningProblem(Profile("BERT-base", slower, EASY.exits), kinds, objective, gap=self.gap)

    def survival(self, easy: float) -> tuple[float, ...]:
        both = zip(EASY.exits.survival, HARD.exits.survival, strict=True)
        return tuple(easy * one + (1 - easy) * other for one, other in both)

    def offered_per_s(self, plan: Plan, facts: Problem) -> float:
        return self.load * evaluate(plan, facts).goodput_per_s


SUITE = Suite()
