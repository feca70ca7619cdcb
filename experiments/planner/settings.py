"""Networks, exit profiles and fleets like those of E3's evaluation (SOSP'24, section 5), from datasheets alone."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from experiments.planner import networks as shapes
from isobatch.optimizer.problem import Problem, problem
from isobatch.profiles.curves import curve_table
from isobatch.profiles.datasheet import Shape, datasheet_table, encoder
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile

Survivors = tuple[tuple[float, float], ...]  # depths as shares of the blocks, each with its survival


def exits_along(survivors: Survivors, blocks: int) -> ExitProfile:
    """The exit profile of a network with this number of blocks, with straight lines between these points."""
    depths, shares = zip(*survivors, strict=True)
    curve = np.interp(np.arange(blocks) / blocks, depths, shares)
    return ExitProfile((1.0, *(float(share) for share in curve[1:])))


@dataclass(frozen=True)
class Network:
    """A shape, and the survival of its inputs by depth."""

    name: str
    shape: Shape
    survivors: Survivors

    @property
    def exits(self) -> ExitProfile:
        return exits_along(self.survivors, len(self.shape.blocks))

    def profile(self, devices: str, dtype: str | None = None, backend: str | None = None) -> Profile:
        """The profile on these devices, by the curves of a backend; without one, by their datasheets alone."""
        kinds = [device.kind for device in fleet(devices)]
        if backend is None:
            tables = [datasheet_table(self.shape, kind, dtype=dtype) for kind in kinds]
        else:
            tables = [curve_table(self.shape, kind, backend=backend, dtype=dtype or "float16") for kind in kinds]
        return Profile(self.name, tuple(tables), self.exits)

    def facts(self, devices: str, dtype: str | None = None, backend: str | None = None) -> Problem:
        kinds = fleet(devices)
        return problem(self.profile(devices, dtype, backend), kinds, links_between(kinds, turn_s=0.0))


# Half of BERT's inputs leave before the middle, most of DistilBERT's in the middle (E3, sections 2 and 5.1).
HALF = ((0.0, 1.0), (0.5, 0.5), (1.0, 0.2))
EARLY = ((0.0, 1.0), (0.34, 0.9), (0.5, 0.35), (1.0, 0.25))
BERT_BASE = Network("BERT-base", shapes.bert_base(), HALF)
BERT_LARGE = Network("BERT-large", shapes.bert_large(), HALF)
DISTILBERT = Network("DistilBERT", shapes.distilbert(), EARLY)
RESNET50 = Network("ResNet-50", shapes.resnet50(), HALF)

ONE_KIND = "v100=46"
FOUR_KINDS = "v100=12,p100=12,k80=12,a6000=10"
EIGHT_KINDS = ("v100", "p100", "k80", "t4", "a10g", "l4", "a6000", "a100")


def deep(blocks: int) -> Network:
    """An encoder of any depth."""
    shape = encoder(f"{blocks} blocks", layers=blocks, hidden=768, inner=3072, length=128, vocabulary=30522)
    return Network(shape.name, shape, HALF)


def evenly(gpus: int, kinds: int) -> str:
    """A fleet of `gpus` devices, of `kinds` kinds.

    >>> evenly(5, 2)
    'v100=3,p100=2'
    """
    edges = [round(gpus * kind / kinds + 1e-9) for kind in range(kinds + 1)]
    counts = sorted((after - before for before, after in pairwise(edges)), reverse=True)
    return ",".join(f"{kind}={count}" for kind, count in zip(EIGHT_KINDS, counts, strict=False))
