"""What persons ask for while the loop looks, thinks or rolls out."""

import asyncio
from contextlib import suppress
from pathlib import Path
from threading import Event as Signal
from typing import Any

from isobatch.cluster.controller.input_planning import ClassifierPlanningProblem
from isobatch.cluster.controller.record import Events
from isobatch.optimizer.plan import Plan
from tests.helpers.fluid_application import MEDIUM, Fluid, batches, control_loop, first_plan, question, run

PATIENCE_S = 10.0


class SlowQuestion(ClassifierPlanningProblem):
    """Plans are sought for as long as a test likes."""

    begun, go_on = Signal(), Signal()

    def best(self, *arguments: Any) -> Plan:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().best(*arguments)


def test_a_pause_while_plans_are_sought_is_kept_and_what_was_found_is_not_rolled_out(tmp_path: Path) -> None:
    asked = question(MEDIUM)
    app = Fluid(SlowQuestion(**vars(asked)), few := batches(first_plan(asked), 4))
    app.rate = lambda at_s: 200.0
    loop = control_loop(app, tmp_path, offload=asyncio.to_thread)
    run(app, loop, 90)

    async def paused_meanwhile() -> None:
        app.now_s += 30
        looking = asyncio.create_task(loop.step())
        assert await asyncio.to_thread(SlowQuestion.begun.wait, PATIENCE_S)
        pausing = asyncio.create_task(loop.pause(True))
        await asyncio.sleep(0.01)
        SlowQuestion.go_on.set()
        await pausing
        await looking

    asyncio.run(paused_meanwhile())
    found, paused = loop.controller.record.events.all
    assert (found.what, paused.what) == ("stayed", "paused")
    assert found.why.endswith("but the controller was paused meanwhile")
    assert loop.controller.record.barred.until_s(found.after or few, app.now_s) is None
    assert (app.rolled, app.running) == ([], few)
    assert [event.what for event in Events(tmp_path / "events.jsonl").all] == ["stayed", "paused"]


def test_a_plan_that_a_client_forced_is_rolled_out_and_told_though_the_client_goes_away() -> None:
    asked = question(MEDIUM)
    app = SlowlyRolled(asked, batches(first_plan(asked), 4))
    loop = control_loop(app)

    async def gone_meanwhile() -> None:
        app.begun = asyncio.Event()
        client = asyncio.create_task(loop.force())
        await app.begun.wait()
        client.cancel()
        with suppress(asyncio.CancelledError):
            await client
        await loop.preview()  # which waits for its turn

    asyncio.run(gone_meanwhile())
    (event,) = loop.controller.record.events.all
    assert (event.what, event.after) == ("rolled out", app.running)
    assert loop.controller.running == app.running


class SlowlyRolled(Fluid):
    begun: asyncio.Event

    async def roll_out(self, plan: Plan) -> None:
        self.begun.set()
        await asyncio.sleep(0.01)
        await super().roll_out(plan)
