"""Survivors that stay where they were computed, until whoever runs them next asks for them.

What travels instead is a claim: who holds them, and under which key. Nobody can guess a key, so whoever knows it may
have what it stands for. A state goes when it is dropped, or at the latest when it can be of no use to anybody any more:
a front that vanishes leaves nothing behind.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from deployments.replicas.wire import Integers, Packed, is_all, pack, take
from profiles.model import Batch

State = Batch | Packed


class LostError(RuntimeError):
    """What was held is held no more: its inputs must begin again."""


@dataclass(frozen=True)
class Held:
    """A claim on inputs that stand before block `cursor`, at `address`."""

    cursor: int
    address: str
    key: str
    count: int
    size_bytes: int = 0

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class Share:
    """Some of the inputs that are held somewhere.

    >>> import numpy as np
    >>> len(Share(Held(4, "10.0.0.7:4242", "7f3a", count=8), np.array([0, 5])))
    2
    """

    held: Held
    rows: Integers

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cursor(self) -> int:
        return self.held.cursor

    @property
    def is_whole(self) -> bool:
        return is_all(self.rows, len(self.held))


class Holdings:
    """What one process holds: batches on their device, or packed in host memory. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = "here"  # how others reach it, once they can
        self._clock = clock
        self._states: dict[str, State] = {}
        self._ends: list[tuple[float, str]] = []
        self._lock = threading.RLock()  # garbage may be collected, and dropped, while it is held

    def __len__(self) -> int:
        return len(self._states)

    def hold(self, state: State, for_s: float) -> Held:
        """Keep it until it is dropped, but no longer than `for_s`."""
        key = secrets.token_hex(16)
        with self._lock:
            self._states[key] = state
            heappush(self._ends, (self._clock() + for_s, key))
        self.expire()
        return Held(state.cursor, self.address, key, len(state), state.size_bytes)

    def has(self, held: Held) -> bool:
        """Whether it is this process that was given it to hold."""
        return held.address == self.address

    def get(self, key: str) -> State:
        state = self._states.get(key)
        if state is None:
            raise LostError(f"{self.address} no longer holds the survivors that it was asked for")
        return state

    def packed(self, key: str, rows: Integers) -> Packed:
        """These rows, to be sent. A batch on a device is brought to the host as a whole, once: others will ask too."""
        state = self.get(key)
        if isinstance(state, Batch):
            state = pack(state)
            with self._lock:
                if key in self._states:
                    self._states[key] = state
        return take(state, rows)

    def drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._states.pop(key, None)

    def expire(self) -> None:
        """Drop what is past its time."""
        now_s = self._clock()
        with self._lock:
            while self._ends and (self._ends[0][0] <= now_s or self._ends[0][1] not in self._states):
                self._states.pop(heappop(self._ends)[1], None)
