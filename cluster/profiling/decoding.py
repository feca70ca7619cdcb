"""What a decoder's launches cost on this device: the real engine runs, and prices are fitted to its launches."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, product
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deployments.decoding.anatomy import anatomy_of
from deployments.decoding.checkpoint import DecoderRamp, DecoderRules
from deployments.decoding.config import DecoderConfig
from deployments.decoding.engine import Engine, Runner
from deployments.decoding.loading import engine_of
from deployments.decoding.scheduler import DecodingLaunch
from deployments.decoding.sequences import Opinion, Splits, Wanted
from deployments.decoding.virtual import size_of
from profiles.decoding import PARTS, PROJECT, DecodingWorkload, LaunchSize
from profiles.errors import UserError

Floats = NDArray[np.float64]
RESIDENTS = (1, 8, 32, 128)
DEPTHS = (0.25, 0.5, 0.75, 1.0)  # of the first part; 1: no cut
TURNS = (*product(RESIDENTS, DEPTHS, ("recompute",)), *product(RESIDENTS, DEPTHS[:-1], (PROJECT,)))
LEAVE = 0.5  # of the tokens, at a cut
HELD_OUT = 4  # of so many launches one tests the prices
WARM = 5  # launches that count for nothing
LEAST = 200  # launches
LAST = 50  # of one setting, when the time is over
FAR = 3.0  # times the median error: such a launch was disturbed, and prices are fitted again without it


@dataclass(frozen=True)
class TimedLaunch:
    """What a launch was made of, and how long the replica was at it."""

    size: LaunchSize
    seconds: float


@dataclass(frozen=True)
class FittedPrices:
    """Prices, and how far they are from launches that they were not fitted to: half are nearer than `error`. `bias` is
    by how much all of these together took more or less than their prices say. No launch had more `sequences`."""

    price_s: LaunchSize
    launches: int
    error: float
    bias: float
    sequences: int

    def __str__(self) -> str:
        return (
            f"prices fitted to {self.launches} launches; of others, half took within {self.error:.1%} of what the "
            f"prices say, and all together {self.bias:+.1%}; {self.sequences} sequences at most"
        )


def measured(
    model: Any,
    workload: DecodingWorkload,
    seconds: float,
    clock: Callable[[], float] | None = None,
    least: int = LEAST,
) -> FittedPrices:
    """Time launches for about so long, and so many at least, of texts like those of the workload."""
    weights = anatomy_of(model).weights
    clock = clock or _clock_for(weights.device)
    found: list[TimedLaunch] = []
    until_s = clock() + seconds
    # Settings again and again, so that what disturbs the machine for a while disturbs all of them.
    for number, (residents, depth, exits) in enumerate(cycle(TURNS)):
        if clock() > until_s and len(found) >= least:
            break
        if not found and number == len(TURNS):
            raise UserError("texts are too short to time their launches: prepare with longer ones (--max-tokens)")
        texts = _texts(model, workload, residents, number)
        found += _launches(model, texts, residents, depth, exits, clock, until_s, number)
    return fitted(found)


def _clock_for(device: torch.device) -> Callable[[], float]:
    """Processor time, which no other program lengthens, where one thread computes; several count it several times."""
    if device.type != "cpu":
        return partial(_synchronized, device)
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def _synchronized(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _texts(model: Any, workload: DecodingWorkload, count: int, seed: int) -> list[Wanted]:
    shape, luck = anatomy_of(model).shape, Random(seed)
    context = shape.context(None)
    found = []
    for _ in range(count + count // 2):  # some begin while others go on
        place = luck.randrange(len(workload.prompts))
        prompt = min(workload.prompts[place], context - 1)
        output = min(workload.outputs[place], shape.room(prompt, context))
        found.append(shape.wanted([luck.randrange(shape.vocabulary) for _ in range(prompt)], output))
    return found


@dataclass
class _Drawn:
    """The real network, at whose ramps as many leave as is told, and what its launches are made of."""

    network: Runner
    splits: Splits
    luck: Random
    sizes: list[LaunchSize] = field(default_factory=list)

    def run(self, launch: DecodingLaunch) -> list[list[Opinion]]:
        self.sizes.append(size_of(launch, self.splits))
        said = self.network.run(launch)
        return [[replace(one, sure=self.luck.random() < LEAVE) for one in each] for each in said]

    def drop(self, name: int) -> None:
        self.network.drop(name)

    def follow(self, splits: Splits) -> None:
        self.splits = splits
        self.network.follow(splits)


def _launches(
    model: Any,
    texts: Sequence[Wanted],
    residents: int,
    depth: float,
    exits: str,
    clock: Callable[[], float],
    until_s: float,
    seed: int,
) -> Iterator[TimedLaunch]:
    """Have these texts written, cut at a share of the depth; all texts come at once."""
    num_blocks = anatomy_of(model).shape.num_blocks
    cut = max(1, round(depth * num_blocks))
    cuts = () if cut >= num_blocks else (cut,)
    engine, drawn = _engine(model, residents, cuts, exits, seed)
    for text in texts:
        engine.open(text)
    for number in range(10**9):
        begun_s = clock()
        if engine.step() is None:
            return
        took_s = clock() - begun_s
        if number >= WARM:
            yield TimedLaunch(drawn.sizes[-1], took_s)
        if begun_s > until_s and number > LAST:
            return


def _engine(model: Any, residents: int, cuts: tuple[int, ...], exits: str, seed: int) -> tuple[Engine, _Drawn]:
    rules = DecoderRules(ramps=tuple(DecoderRamp(block=cut - 1, threshold=0.5) for cut in cuts))
    told = {"exits": exits, "max_residents": residents, "max_waiting": 10**9, "ttft_ms": 1e12, "tpot_ms": 1e12}
    engine = engine_of(model, rules, DecoderConfig.model_validate({"model": "", **told}))
    drawn = _Drawn(engine.network, engine.scheduler.splits, Random(seed))
    return Engine(engine.scheduler, drawn, time.perf_counter), drawn


def fitted(found: Sequence[TimedLaunch]) -> FittedPrices:
    """Prices, none below 0, whose relative errors are least; launches that are far off are left out the second time."""
    sizes = np.array([[getattr(each.size, name) for name in PARTS] for each in found])
    seconds = np.array([each.seconds for each in found])
    kept = (np.arange(len(found)) % HELD_OUT) > 0
    prices = _prices(sizes[kept], seconds[kept])
    off = np.abs(sizes @ prices / seconds - 1)
    near = off <= FAR * np.median(off[kept])
    prices = _prices(sizes[kept & near], seconds[kept & near])
    told = sizes[~kept] @ prices
    error = float(np.median(np.abs(told / seconds[~kept] - 1)))
    bias = float(seconds[~kept].sum() / told.sum() - 1)
    price_s = LaunchSize(*(float(f"{price:.4g}") for price in prices))
    return FittedPrices(price_s, int(kept.sum()), error, bias, int(max(each.size.pieces for each in found)))


def _prices(sizes: Floats, seconds: Floats) -> Floats:
    from scipy.optimize import nnls

    scaled = sizes / seconds[:, None]
    scale = np.abs(scaled).max(axis=0)
    scale[scale == 0] = 1.0
    prices: Floats = nnls(scaled / scale, np.ones(len(seconds)))[0] / scale
    return prices


def weights_bytes(model: Any) -> int:
    return sum(each.nbytes for each in {part.data_ptr(): part for part in model.parameters()}.values())
