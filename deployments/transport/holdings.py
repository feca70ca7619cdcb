"""Holds survivors where they were computed, until the replica that runs the next split fetches them.

The front gets a claim instead, with the holder's address and a key. The key cannot be guessed, so no other permission
is checked. Survivors are forgotten when the front drops them or when their time is up, so a front that vanishes leaves
nothing behind.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from isobatch.deployments.transport.connection import Message
from isobatch.deployments.transport.packed import Integers, Packed, Packing, is_all, pack, take
from isobatch.profiles.model import Batch

State = Batch | Packed | Packing
MOST_DROPPED = 1000  # survivors that were dropped before their time may leave this many entries


class LostError(RuntimeError):
    """The holder no longer has the survivors, so their inputs must begin again at block 0."""


def public_address(address: str) -> str:
    """An address without its key, for logs and errors.

    >>> public_address("7f3a@10.0.0.7:4242")
    '10.0.0.7:4242'
    """
    return address.rpartition("@")[2]


class Claim(Message, frozen=True, weakref=True):
    """A claim on `count` inputs before block `cursor`, which are held at `address`. It is sent as it is.

    The address begins with the key of the holding process; `key` is the key of these survivors.
    """

    cursor: int
    address: str
    key: str
    count: int
    size_bytes: int = 0

    def __len__(self) -> int:
        return self.count


class Share(Message, frozen=True):
    """Some of the inputs of a claim."""

    claim: Claim
    rows: Integers

    @property
    def is_complete(self) -> bool:
        return is_all(self.rows, len(self.claim))


class Holdings:
    """All survivors that one process holds, on their device or packed in host memory. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = "here"  # replaced by the address at which other processes reach this one
        self._clock = clock
        self._states: dict[str, State] = {}
        self._ends: list[tuple[float, str]] = []  # a heap, also of survivors that were dropped earlier
        self._lock = threading.RLock()  # reentrant: garbage collection under the lock may drop survivors

    def __len__(self) -> int:
        return len(self._states)

    def hold(self, state: State, for_s: float) -> Claim:
        """Hold a batch until it is dropped, but no longer than `for_s`."""
        key = secrets.token_hex(16)
        with self._lock:
            self._states[key] = state
            heappush(self._ends, (self._clock() + for_s, key))
        self.expire()
        return Claim(state.cursor, self.address, key, len(state), state.size_bytes)

    def has(self, claim: Claim) -> bool:
        """Whether this process is the holder."""
        return claim.address == self.address

    def get(self, key: str) -> State:
        state = self._states.get(key)
        if state is None:
            raise LostError(f"{public_address(self.address)} no longer holds the requested survivors")
        return state

    def packed(self, key: str, rows: Integers) -> Packed:
        """These rows, ready to be sent. A batch on a device is copied to the host once, for later requests too."""
        state = self.get(key)
        if isinstance(state, Packed):
            return take(state, rows)
        packed = pack(state)
        with self._lock:
            if key in self._states:
                self._states[key] = packed
        return take(packed, rows)

    def drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._states.pop(key, None)

    def expire(self) -> None:
        """Drop all survivors whose time is up."""
        now_s = self._clock()
        with self._lock:
            while self._ends and (self._ends[0][0] <= now_s or self._ends[0][1] not in self._states):
                self._states.pop(heappop(self._ends)[1], None)
            if len(self._ends) > 2 * len(self._states) + MOST_DROPPED:
                self._ends = [end for end in self._ends if end[1] in self._states]
                heapify(self._ends)
