"""Arrival times and difficulty of inputs, for the simulator and for load on a running system.

Arrivals are ascending times in seconds from 0. Everything is drawn from a seed: the same call has the same result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Run = TypeVar("Run")
MOST_INPUTS = 2e8  # of one run; each needs several times 8 bytes
LEAST_CV = 1e-3  # of gaps; below it they are all equal
MOST_CV = 100.0  # of gaps; above it nearly all are 0


def arrivals(process: str, rate_per_s: float, seconds: float, seed: int, cv: float = 3.0) -> Floats:
    """Arrivals of a process at a mean rate. `cv` is the variation of the gaps (gamma only; 1 is Poisson).

    >>> arrivals("uniform", rate_per_s=4, seconds=1, seed=0).tolist()
    [0.0, 0.25, 0.5, 0.75]
    """
    check(rate_per_s, seconds)
    if process not in PROCESSES:
        raise UserError(f"unknown arrival process {process!r}: choose among {', '.join(PROCESSES)}")
    return PROCESSES[process](rate_per_s, seconds, np.random.default_rng(seed), cv)


def check(rate_per_s: float, seconds: float) -> None:
    """Raise UserError if the workload is empty or too large for memory: all arrivals are drawn at once."""
    if not (rate_per_s > 0 and seconds > 0 and isfinite(rate_per_s * seconds)):
        raise UserError(f"a workload needs a rate and a time above 0, got {rate_per_s:g} per second for {seconds:g} s")
    if (inputs := rate_per_s * seconds) > MOST_INPUTS:
        most = f"{MOST_INPUTS:g} at most, lower rate or time"
        raise UserError(f"{inputs:.3g} inputs at once are more than memory holds: {most}")


def _gamma(rate: float, seconds: float, random: np.random.Generator, cv: float) -> Floats:
    if not LEAST_CV <= cv <= MOST_CV:
        limits = f"{LEAST_CV:g} to {MOST_CV:g}"
        raise UserError(f"cv = {cv:g} must be {limits}: it is the variation of the gaps, 1 is Poisson")
    shape = 1 / cv**2
    chunks, last_s = [], 0.0
    while last_s < seconds:
        gaps = random.gamma(shape, 1 / (rate * shape), int(rate * seconds) + 100)
        chunks.append(last_s + np.cumsum(gaps))
        last_s = float(chunks[-1][-1])
    times = np.concatenate(chunks)
    return times[times < seconds]


def following(weights: Floats, rate: float, seconds: float, random: np.random.Generator) -> Floats:
    """Poisson arrivals at this mean rate. The rate is proportional to `weights` in periods of equal length."""
    share = np.append(0.0, np.cumsum(weights) / weights.sum())
    uniform = np.sort(random.random(random.poisson(rate * seconds)))
    return np.interp(uniform, share, np.linspace(0.0, seconds, len(share)))


# Of a mean rate, a duration, a generator of random numbers and the variation of the gaps.
PROCESSES: dict[str, Callable[[float, float, np.random.Generator, float], Floats]] = {
    "poisson": lambda rate, seconds, random, cv: np.sort(random.random(random.poisson(rate * seconds))) * seconds,
    "gamma": _gamma,
    "uniform": lambda rate, seconds, random, cv: np.arange(np.ceil(rate * seconds)) / rate,
}


@dataclass(frozen=True)
class Mix:
    """A mix of easy and hard inputs. `shares` are (seconds, share of easy inputs) in ascending order of time.

    >>> easy, hard = ExitProfile((1.0, 0.0)), ExitProfile((1.0, 1.0))
    >>> mix = Mix(easy, hard, ((0.0, 1.0), (10.0, 0.0)))
    >>> mix.easy_share(np.array([0.0, 5.0, 10.0])).tolist()
    [1.0, 1.0, 0.0]
    """

    easy: ExitProfile
    hard: ExitProfile
    shares: tuple[tuple[float, float], ...] = ((0.0, 0.8),)

    def __post_init__(self) -> None:
        if self.easy.num_blocks != self.hard.num_blocks:
            raise UserError(f"easy inputs meet {self.easy.num_blocks} blocks, hard ones {self.hard.num_blocks}")

    @classmethod
    def of(cls, profile: ExitProfile, shares: tuple[tuple[float, float], ...]) -> "Mix":
        """Split a profile: easy inputs are the half that leaves first. An equal mix has the profile's survival.

        >>> Mix.of(ExitProfile((1.0, 0.8, 0.4)), ((0.0, 0.5),)).easy.survival
        (1.0, 0.6, 0.0)
        """
        easy = tuple(round(max(0.0, 2 * share - 1), 12) for share in profile.survival)
        hard = tuple(min(1.0, 2 * share) for share in profile.survival)
        return cls(ExitProfile(easy), ExitProfile(hard), shares)

    def easy_share(self, times_s: Floats) -> Floats:
        at, share = (np.array(each) for each in zip(*self.shares, strict=True))
        return np.asarray(share[np.maximum(np.searchsorted(at, times_s, side="right") - 1, 0)])

    def exit_blocks(self, times_s: Floats, random: np.random.Generator) -> Ints:
        """The block after which each of these arrivals is sure."""
        is_easy = random.random(len(times_s)) < self.easy_share(times_s)
        easy, hard = (exit_blocks(profile, len(times_s), random) for profile in (self.easy, self.hard))
        return np.where(is_easy, easy, hard)


def exit_blocks(profile: ExitProfile, size: int, random: np.random.Generator) -> Ints:
    """The block after which each of `size` inputs is sure. An input that draws u survives while survival is above u.

    >>> exit_blocks(ExitProfile((1.0, 0.0)), 3, np.random.default_rng(0)).tolist()
    [0, 0, 0]
    """
    return exits_at(profile, random.random(size))


def exits_at(profile: ExitProfile, draws: Floats) -> Ints:
    """The block after which each input is sure, for draws from 0 to 1."""
    ascending = np.array(profile.survival[:0:-1])
    survived = len(ascending) - np.searchsorted(ascending, draws, side="right")
    return np.asarray(survived, np.int64)


def highest(
    run_at: Callable[[float], Run], accepts: Callable[[Run], bool], low: float, high: float, steps: int
) -> Run | None:
    """The accepted run with the highest rate between `low` and `high`, by bisection in `steps`; None: no run is."""
    best: Run | None = None
    for _ in range(steps):
        rate = (low + high) / 2
        run = run_at(rate)
        if accepts(run):
            low, best = rate, run
        else:
            high = rate
    return best
