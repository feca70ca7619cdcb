"""Searches the rates of systems that take turns in one server, and times a chain of layers for the machine's speed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from experiments.real.served import PlannedSystem, RealCase, ServedNetwork
from experiments.shared import rate_search
from experiments.shared.rate_search import FIRST, RateSearch
from experiments.shared.real_network import DTYPE, KIND, WIDTH

CHAINS, LAYERS, TOKENS = 20, 144, 32 * 13  # plain layers with the arithmetic of BERT-base; tokens of a batch


@dataclass(frozen=True)
class Sustained:
    """The rate of a system, and the machine's slowdown beside its runs since the profile."""

    per_s: float
    slower: float


async def in_turns(
    served: ServedNetwork, planned: Sequence[PlannedSystem], slower: Callable[[], float], turns: int, seconds: float,
    seed: int, begin: float = FIRST,
) -> Mapping[str, Sustained]:  # fmt: skip
    """The rate of each system, by runs of `seconds`. The first is at `begin` of the promise.

    `slower`: the machine's present slowdown since the profile.
    """
    now, systems = slower(), {system.name: system for system in planned}
    searches = {name: RateSearch(begin * system.promised_per_s / now) for name, system in systems.items()}
    speeds: dict[str, list[float]] = {name: [] for name in searches}

    async def passes(name: str, per_s: float, turn: int) -> bool:
        await served.follow(systems[name])
        speeds[name].append(slower())
        return await served.server.sustains(per_s, seconds, turns * seed + turn)

    await rate_search.in_turns(searches, turns, passes)
    return {name: Sustained(own.sustained_per_s, median(speeds[name])) for name, own in searches.items()}


def chain_s(case: RealCase) -> float:
    """The time of a chain of plain layers on one thread, which shows the machine's present speed.

    Only for a CPU. For int8, the chain has the processor's fastest precision.
    """
    if case.size.device != KIND:
        return 1.0
    torch.set_num_threads(1)
    dtype = getattr(torch, DTYPE if case.dtype == "int8" else case.dtype)
    layers = [torch.randn(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)]  # each layer has its own memory
    hidden, times = torch.randn(TOKENS, WIDTH, dtype=dtype), list[float]()
    with torch.inference_mode():
        for _ in range(CHAINS):
            began_s, each = time.perf_counter(), hidden
            for layer in layers:
                each = torch.nn.functional.linear(each, layer)
            times.append(time.perf_counter() - began_s)
    return median(times)
