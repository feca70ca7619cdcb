"""The conditions of a simulation: the costs of serving beside the devices, and what goes wrong.

Costs are the fronts' work, for which requests and launches queue, and travel time. No table has them:
`experiments/fidelity/calibration.py` measures them where the live graph runs. Troubles are launches that vary or fail,
and replicas that are slow or gone for a while.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from pydantic import BaseModel, ConfigDict, Field

from isobatch.profiles.errors import UserError


@dataclass(frozen=True)
class Outage:
    """A replica that is gone for a while. The launches that it runs and the survivors that it holds are lost."""

    replica: str
    from_s: float
    until_s: float


@dataclass(frozen=True)
class Troubles:
    """The faults. Without any, launches take exactly as long as the tables say. Replicas are `KIND/NUMBER`, from 0."""

    jitter: float = 0.0  # standard deviation of the logarithm of a launch's time
    slow: Mapping[str, float] = field(default_factory=dict)  # replica -> how many times slower it is
    fail_share: float = 0.0  # of all launches
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < inf or not 0 <= self.fail_share < 1:
            raise UserError(
                f"jitter = {self.jitter} must be 0 or more and finite, fail_share = {self.fail_share} in 0..1"
            )
        if bad := [name for name, times in self.slow.items() if not 0 < times < inf]:
            raise UserError(f"{bad[0]} cannot be {self.slow[bad[0]]:g} times slower: give a finite number above 0")
        for outage in self.outages:
            if not 0 <= outage.from_s < outage.until_s:
                raise UserError(f"{outage.replica} cannot be gone from {outage.from_s:g} until {outage.until_s:g} s")

    @property
    def replicas(self) -> set[str]:
        return {*self.slow, *(outage.replica for outage in self.outages)}


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
