"""The costs of serving beside the devices: the fronts' work, for which requests and launches queue, and travel time.

No table has these costs: `experiments/fidelity/calibration.py` measures them where the live graph runs.
"""

import heapq

from pydantic import BaseModel, ConfigDict, Field


class HostCosts(BaseModel):
    """Seconds of the front's work and of travel, for each request and launch; by default everything is free.

    Half of a request's work is done before it is admitted, half when its answer is known; half of a launch's before it
    leaves for its replica, half when it is back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    request_s: float = Field(0.0, ge=0, description="a front's work for a request")
    launch_s: float = Field(0.0, ge=0, description="a front's work for a launch")
    request_way_s: float = Field(0.0, ge=0, description="of a request, there and back, while no front works for it")
    launch_way_s: float = Field(0.0, ge=0, description="of a launch, to its replica and back")
    turn_s: float = Field(0.0, ge=0, description="of a device for every launch, beside what its table says")


class FrontWorkers:
    """A number of workers with one queue, served in the order in which work comes."""

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count

    def done_s(self, now_s: float, seconds: float) -> float:
        """The time at which work that comes now is done.

        >>> one = FrontWorkers(1)
        >>> one.done_s(1.0, 0.5), one.done_s(1.2, 0.5), one.done_s(9.0, 0.5)
        (1.5, 2.0, 9.5)
        """
        done_s = max(now_s, self._free_s[0]) + seconds
        heapq.heapreplace(self._free_s, done_s)
        return done_s
