"""Decoders on paper, and one that the controller leads: one replica in virtual time, asked for texts at a rate."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

from isobatch.cluster.controller.config import Patience
from isobatch.cluster.controller.control_loop import ControlLoop
from isobatch.cluster.controller.core import Controller
from isobatch.cluster.controller.record import Events
from isobatch.cluster.controller.text_planning import DecoderPlanningProblem
from isobatch.cluster.simulator.text_simulation import SimulatedReplica, TextArrival
from isobatch.deployments.decoding.client_meter import ClientMeter, SequenceMeter
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.decoding.scheduler import NewTokens
from isobatch.deployments.front.observed import Observed, since
from isobatch.deployments.metrics import TEXT_FRONT, MetricSeries
from isobatch.optimizer.plan import Plan
from isobatch.profiles.devices import Device
from isobatch.profiles.text_profile import DecoderProfile, DecodingTable, DecodingWorkload, LaunchSize
from isobatch.profiles.windows import History
from tests.helpers.scraping import NotedMetrics


class _Metered(SimulatedReplica):
    """A replica whose tokens are counted as a front counts them."""

    def meter_by(self, meter: ClientMeter) -> None:
        self.meter, self.meters = meter, dict[int, SequenceMeter]()

    def add(self, place: int, text: TextArrival) -> None:
        sequence = self.meters[place] = self.meter.sequence(text.prompt)
        super().add(place, text)
        if place in self.written:
            sequence.refused()

    def note(self, news: Iterable[NewTokens]) -> None:
        written = list(news)
        for one in written:
            meter = self.meters[self.names[one.name].place]
            meter.wrote(one.depths)
            if one.finish:
                meter.finished()
        super().note(written)


class PaperApplication:
    """`per_s` texts come in a second. `truth` is who goes on, after each block that a ramp may follow."""

    def __init__(self, question: DecoderPlanningProblem, plan: Plan, per_s: float, seed: int = 0) -> None:
        self.question, self.running, self.per_s, self.rolled = question, plan, per_s, list[Plan]()
        self._luck, self._asked, self._due_s, self._before = Random(seed), 0, 0.0, None
        self._config = DecoderConfig(model="").with_plan(plan)
        self._replica = _Metered(question.profile, plan.placements[0].kind, self._config, Random(seed))
        metrics, terms = MetricSeries(TEXT_FRONT, NotedMetrics()), question.goal
        self._meter = ClientMeter(metrics, self._replica.clock, terms.ttft_s, terms.tpot_s)
        self._replica.meter_by(self._meter)

    @property
    def now_s(self) -> float:
        return self._replica.clock.now_s

    def becomes(self, **workload: Any) -> None:
        """From now on texts, or who goes on, are others."""
        network: Any = self._replica.engine.network
        network.workload = replace(network.workload, **workload)

    def run(self, seconds: float) -> None:
        """Texts come by chance."""
        until_s, workload = self.now_s + seconds, self._replica.engine.network.workload
        while self._due_s < until_s:
            self._replica.run_until(self._due_s)
            place = self._luck.randrange(len(workload.prompts))
            self._replica.add(self._asked, TextArrival(self._due_s, workload.prompts[place], workload.outputs[place]))
            self._asked += 1
            self._due_s += self._luck.expovariate(self.per_s)
        self._replica.run_until(until_s)

    def seen(self) -> Observed:
        """Since the start."""
        return self._meter.observed(self.question.profile.num_blocks)

    async def observe(self, devices: bool = True) -> Observed:
        now = self.seen()
        news, self._before = since(now, self._before), now
        return news

    async def plan(self) -> Plan:
        return self.running

    async def roll_out(self, plan: Plan) -> None:
        config, scheduler = self._config.switched_to(plan), self._replica.engine.scheduler
        self._replica.engine.recut(config.splits(config.cuts or (), scheduler.splits.num_blocks), config.limits())
        self.running = plan
        self.rolled.append(plan)

    def loop(self, **patience: float) -> ControlLoop:
        terms = Patience(**{"look_every_s": 0.5, **patience})
        controller = Controller(self.question, terms, History(None), Events(None), self.running, self.now_s)
        return ControlLoop(self, controller, lambda: self.now_s, lambda: 0.0, report=lambda event: None)


async def watched(app: PaperApplication, loop: ControlLoop, seconds: float, look_s: float) -> Observed:
    """Run with the controller beside it; what was seen in that time."""
    before, until_s = app.seen(), app.now_s + seconds
    while app.now_s < until_s - 1e-9:
        app.run(look_s)
        await loop.step()
    return since(app.seen(), before)


WEIGHTS_BIND = LaunchSize(blocks=1e-3)
BOTH = LaunchSize(launches=2e-4, pieces=1e-6, blocks=2e-4, rows=1e-5, read=2e-8, heads=1e-4, asked=5e-6)
CPU = Device("cpu", 1, 16 * 10**9, 0.19)


def paper_decoder(
    price_s: LaunchSize = BOTH, survival: tuple[tuple[int, float], ...] = ((1, 0.3),), prompt: int = 16,
    output: int = 32, num_blocks: int = 8, kind: str = "cpu", has_encoder: bool = False, reads: int = 256,
) -> DecoderProfile:  # fmt: skip
    """Texts are of one length, and of half as much again: prompts and outputs by turns."""
    prompts, outputs = (prompt, prompt + prompt // 2), (output + output // 2, output)
    table = DecodingTable(kind, price_s, "made up", 1024, 10**6, error=0.1)
    workload = DecodingWorkload(survival, prompts, outputs)
    return DecoderProfile("paper", num_blocks, reads, (table,), workload, has_encoder)
