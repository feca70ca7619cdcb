"""Wrong HTTP by the thousand in CI, by ten thousands in `make fuzz`: nobody's bytes stop what listens here.

No case is a 5xx but 503 and 504, takes over a second, makes memory grow or spoils what an honest client is told.
"""

import pytest

from tests.fuzz import cases
from tests.fuzz.attack import AT_ONCE, attack, within_memory
from tests.fuzz.clients import judged, judged_honest, judged_raw, raw
from tests.fuzz.served import Served


@pytest.mark.parametrize("kind", cases.HTTP)
def test_http(served: Served, kind: str) -> None:
    share, path, case = cases.HTTP[kind]

    async def act(sent: tuple[bytes, cases.Headers]) -> str:
        return judged(await served.ask(path, sent[1], sent[0]))

    within_memory(kind, lambda: served.run(attack(kind, share / 2, case, act, AT_ONCE)))


def test_raw_http(served: Served) -> None:
    async def act(sent: bytes) -> str:
        return judged_raw(await raw(served.http_port, sent))

    within_memory("raw_http", lambda: served.run(attack("raw_http", 0.03, cases.raw_http, act, AT_ONCE)))


def test_the_honest_client_was_right_and_was_not_kept_waiting(served: Served) -> None:
    judged_honest("honest_http", served.honest)
