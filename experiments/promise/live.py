"""Measures agreement live: the demo of `isobatch serve` and its controller, while digits become noisier.

Every answer is compared with the full network's, computed before, so that the figures need no audits; the controller
uses audits. The control is the agreement of the demo's own thresholds on the same digits.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from experiments.serve import servers
from experiments.shared.live import answer_at
from isobatch.cluster.load.generator import LoadGenerator
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import NOISE, demo_inputs
from isobatch.deployments.models import load
from isobatch.deployments.models.predict import predict
from isobatch.deployments.models.served_model import ServedModel
from isobatch.profiles.losses import Labels

MINUTES = 10
REQUESTS_PER_S, TOGETHER = 25, 8  # digits of a request
STEERING = {"slo_ms": 50, "max_batch": 32, "one_machine": True}
AUDITS = {"audit_share": 0.2, "audit_cost": 0.1}  # a fifth of the inputs is enough within a minute
NOISIEST = 0.6  # of full ink, as the end of the page's slider
PROMISED = 0.99  # the demo's promise of agreement
STEP_S, A_MINUTE = 5.0, 12  # seconds of one noise, and their number in a minute
DISTINCT = 512  # different digits of a step
console = Console(stderr=True)


@dataclass(frozen=True)
class NoisyDigits:
    """Digits of one noise: requests, the answers of the full network, and the disagreement of its own thresholds."""

    bodies: list[bytes]
    full: Labels
    own_share: float

    @classmethod
    def of(cls, network: ServedModel, noise: float, seed: int) -> "NoisyDigits":
        digits = demo_inputs(DISTINCT, noise, seed).round(1)
        full, own = (
            np.array([each.label for each in predict(network, list(digits), exits)]) for exits in (False, True)
        )
        several = digits.reshape(-1, TOGETHER, *digits.shape[1:])
        bodies = [json.dumps({"inputs": each.tolist()}).encode() for each in several]
        return cls(bodies, full.reshape(-1, TOGETHER), float((own != full).mean()))

    def answered_at(self, base: str) -> float:
        """The share of a server's answers that are not the full network's."""
        missed = list[float]()

        def compared(request: int, answer: bytes) -> bool:
            labels = [each["label"] for each in json.loads(answer)["outputs"]]
            missed.append(float((labels != self.full[request]).mean()))
            return True

        due_s = np.arange(0.0, STEP_S, 1 / REQUESTS_PER_S)
        asyncio.run(LoadGenerator(f"{base}/predict", self.bodies, right=compared).at(due_s))
        return float(np.mean(missed))


def noises(steps: int) -> list[float]:
    """The noise of each step: usual in the first fifth, then growing until the middle, then constant.

    >>> found = noises(11)
    >>> found[1] == NOISE, [round(noise, 9) for noise in found[5:]] == [NOISIEST] * 6
    (True, True)
    """
    grown = np.clip((np.linspace(0.0, 1.0, steps) - 0.2) / 0.3, 0.0, 1.0)
    result: list[float] = (NOISE + (NOISIEST - NOISE) * grown).tolist()
    return result


def live(minutes: int) -> dict[str, float]:
    """The share of minutes in which at least 99 % of the answers are the full network's."""
    network = load(demo_directory())
    steps = [NoisyDigits.of(network, noise, seed) for seed, noise in enumerate(noises(minutes * A_MINUTE))]
    with servers.demo(AUDITS, STEERING) as base:
        kept = [step.answered_at(base) for step in steps]
        events = answer_at(f"{base}/controller/status")["events"]
    for each in events:
        console.print(f"{each['what']}: {each['why']}", markup=False, highlight=False)
    return {
        "windows_kept_share_live": _kept_share(kept),
        "windows_kept_share_live_fixed": _kept_share([step.own_share for step in steps]),
    }


def _kept_share(shares: Sequence[float]) -> float:
    minutes = np.reshape(shares, (-1, A_MINUTE)).mean(axis=1)
    return float(np.mean(minutes <= 1 - PROMISED))
