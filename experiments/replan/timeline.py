"""Counts goodput by the second, to show the effect of changes and faults of an application."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from experiments.replan.suite import SURVIVAL, leaves_after
from isobatch.cluster.load.generator import BROKEN, Carrier, Floats, HttpConnection, LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import exit_blocks
from isobatch.profiles.exits import ExitProfile

WINDOW_S = 1.0
STEP_S = 0.1
AGAIN_S = 0.1  # the pause before a request is sent again after its connection broke
KINDS = 500  # inputs that are drawn once and sent in turns


class PersistentLoad(LoadGenerator):
    """Sends a request again if its connection ends without an answer, until `again_s` after it was due."""

    def __init__(
        self, url: str, bodies: Sequence[bytes], headers: str, right: Callable[[int, bytes], bool], again_s: float
    ) -> None:
        super().__init__(url, bodies, headers=headers, right=right)
        self._again_s = again_s
        self.resent: set[int] = set()  # requests that were sent more than once

    def _finish(self, connection: Carrier, index: int, status: int, answer: bytes) -> None:
        if status == BROKEN and self.now_s() < self._rows["due_s"][index] + self._again_s:
            self._release(connection)
            return self._later(index)
        return super()._finish(connection, index, status, answer)

    def _later(self, index: int) -> None:
        self.resent.add(index)
        asyncio.get_running_loop().call_later(AGAIN_S, lambda: self._begin_task(self._send_anew(index)))

    async def _send_anew(self, index: int) -> None:
        """Send the request over a new connection, since idle ones may have broken for the same reason."""
        try:
            _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, *self._place)
        except OSError:
            if self.now_s() < self._rows["due_s"][index] + self._again_s:
                return self._later(index)
            self._pending -= 1
            return None
        self._open += 1
        return self._ask(connection, index)


def _leaves_there(left_after: int, sure_after: int) -> bool:
    return left_after == leaves_after(sure_after)


def load(
    url: str,
    slo_ms: float,
    again_s: float = 0.0,
    leaves_right: Callable[[int, int], bool] = _leaves_there,
    fresh: bool = False,
) -> PersistentLoad:
    """Requests that name the block after which their input is sure, so that each answer can be checked.

    `leaves_right(left after, sure after)`: whether an input may leave after this block. `fresh`: each request has a
    connection of its own.
    """
    depths = exit_blocks(ExitProfile(SURVIVAL), KINDS, np.random.default_rng(0)).tolist()
    bodies = [json.dumps({"inputs": {"exit_block": depth}}).encode() for depth in depths]

    def right(body: int, answer: bytes) -> bool:
        outputs = json.loads(answer)["outputs"]
        return len(outputs) == 1 and leaves_right(outputs[0]["exit_block"], depths[body])

    headers = f"X-Deadline-Ms: {slo_ms:g}\r\n" + "Connection: close\r\n" * fresh
    return PersistentLoad(url, bodies, headers, right, again_s)


@dataclass(frozen=True)
class Timeline:
    """Answers in time per second, in windows of a second that begin `STEP_S` apart."""

    starts_s: Floats
    good_per_s: Floats

    def during(self, *stretches: tuple[float, float]) -> Floats:
        """The goodput of the windows that overlap with any of these stretches of time."""
        return self.good_per_s[self._overlap(stretches)]

    def outside(self, *stretches: tuple[float, float]) -> Floats:
        return self.good_per_s[~self._overlap(stretches)]

    def _overlap(self, stretches: Iterable[tuple[float, float]]) -> NDArray[np.bool_]:
        result = np.zeros(len(self.starts_s), bool)
        for start_s, stop_s in stretches:
            result |= (self.starts_s + WINDOW_S > start_s) & (self.starts_s < stop_s)
        return result

    def recovered_s(self, at_s: float, until_s: float, enough_per_s: float) -> float:
        """Seconds from `at_s` until all later windows, up to `until_s`, have enough goodput; infinite if the last has
        not."""
        here = (self.starts_s >= at_s - WINDOW_S) & (self.starts_s + WINDOW_S < until_s)
        short = self.good_per_s[here] < enough_per_s
        if not short.any():
            return 0.0
        return inf if short[-1] else max(0.0, float(self.starts_s[here][short].max()) + STEP_S - at_s)


def timeline(record: LoadRecord, slo_ms: float, by_due: bool = False) -> Timeline:
    """Answers in time by the time of the answer, or (`by_due`) of the request, which is smoother.

    The first and the last second are left out, since the load begins and ends there.
    """
    good = (record.status == 200) & (1e3 * (record.ended_s - record.due_s) <= slo_ms)
    at_s = np.sort((record.due_s if by_due else record.ended_s)[good])
    starts_s = np.arange(WINDOW_S, record.due_s.max(initial=0.0) - WINDOW_S, STEP_S)
    counts = np.searchsorted(at_s, starts_s + WINDOW_S) - np.searchsorted(at_s, starts_s)
    return Timeline(starts_s, counts / WINDOW_S)
