"""The faults of a simulation: launches that vary or fail, and replicas that are slow or gone for a while."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from profiles.errors import UserError


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
