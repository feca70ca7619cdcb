"""Goodput second by second, and how it fares around what is done to the application meanwhile."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.load import Floats, Load, Record
from experiments.replan.suite import SURVIVAL, leaves_after
from experiments.workloads import exit_blocks
from profiles.exits import ExitProfile

WINDOW_S = 1.0
STEP_S = 0.1
KINDS = 500  # of inputs, drawn once and sent in turns


def load(url: str, slo_ms: float, seed: int = 0) -> Load:
    """Inputs that say where they are sure, so that each answer can be checked."""
    depths = exit_blocks(ExitProfile(SURVIVAL), KINDS, np.random.default_rng(seed)).tolist()
    bodies = [json.dumps({"inputs": {"exit_block": depth}}).encode() for depth in depths]

    def right(body: int, answer: bytes) -> bool:
        outputs = json.loads(answer)["outputs"]
        return len(outputs) == 1 and bool(outputs[0]["exit_block"] == leaves_after(depths[body]))

    return Load(url, bodies, headers=f"X-Deadline-Ms: {slo_ms:g}\r\n", right=right, resends=True)


@dataclass(frozen=True)
class Timeline:
    """Answers in time per second, in windows of a second that begin `STEP_S` apart."""

    starts_s: Floats
    good_per_s: Floats

    def least(self, start_s: float, stop_s: float) -> float:
        """In any window that overlaps with this stretch."""
        inside = (self.starts_s + WINDOW_S > start_s) & (self.starts_s < stop_s)
        return float(self.good_per_s[inside].min()) if inside.any() else float("nan")

    def recovered_s(self, at_s: float, enough_per_s: float) -> float:
        """How long after this moment a window ends from which on all have enough."""
        short = (self.starts_s >= at_s - WINDOW_S) & (self.good_per_s < enough_per_s)
        return max(0.0, float(self.starts_s[short].max()) + STEP_S - at_s) if short.any() else 0.0


def timeline(record: Record, slo_ms: float) -> Timeline:
    """By when answers came. The first and the last second are left out: the load begins and ends there."""
    good = (record.status == 200) & (1e3 * (record.ended_s - record.due_s) <= slo_ms)
    ended_s = np.sort(record.ended_s[good])
    starts_s = np.arange(WINDOW_S, record.due_s.max(initial=0.0) - WINDOW_S, STEP_S)
    counts = np.searchsorted(ended_s, starts_s + WINDOW_S) - np.searchsorted(ended_s, starts_s)
    return Timeline(starts_s, counts / WINDOW_S)


def steady_per_s(times: Timeline, events_s: Sequence[float], apart_s: float = 3.0) -> float:
    """The mean of all windows that nothing was done near."""
    near = np.zeros(len(times.starts_s), bool)
    for event_s in events_s:
        near |= (times.starts_s > event_s - WINDOW_S) & (times.starts_s < event_s + apart_s)
    calm = times.good_per_s[~near]
    return float(calm.mean()) if len(calm) else float(np.median(times.good_per_s))
