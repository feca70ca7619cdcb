"""The figures on the pages, with claim, aim and the paper's value (headlines.txt)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Headline:
    """One figure of a benchmark. `aim`: a bound; `paper`: the paper's value on its own machines."""

    claim: str
    figure: str
    says: str
    aim: float | None = None
    at_most: bool = False
    paper: float | None = None

    def cells(self, value: float | None) -> tuple[str, str, str, str]:
        """
        >>> Headline("sim", "requests_per_s", "requests simulated in a second", aim=100_000).cells(152_360.0)
        ('requests simulated in a second', '152,400', '≥ 100,000', '')
        >>> Headline("serve", "lone_extra_ms", "a lone request (ms)", aim=5, at_most=True).cells(5.7)
        ('a lone request (ms)', '**5.7**', '≤ 5', '')
        """
        return self.says, self._value(value), self._aim(), "" if self.paper is None else _short(self.paper)

    def _value(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        return _short(value) if self.met(value) else f"**{_short(value)}**"

    def _aim(self) -> str:
        return "" if self.aim is None else f"{'≤' if self.at_most else '≥'} {_short(self.aim)}"

    def met(self, value: float) -> bool:
        return self.aim is None or self._reaches(value, self.aim)

    def cells_of_paper(self, value: float | None) -> tuple[str, str, str]:
        """The paper's value and ours, which is bold if it is worse.

        >>> Headline("tcb", "slots", "slots, of 10 rows", paper=1.18).cells_of_paper(1.018)
        ('slots, of 10 rows', '1.18', '**1.018**')
        """
        assert self.paper is not None
        found = "not measured" if value is None else _short(value)
        short_of_it = value is not None and not self._reaches(value, self.paper)
        return self.says, _short(self.paper), f"**{found}**" if short_of_it else found

    def missed(self, value: float) -> str:
        """
        >>> Headline("serve", "lone_extra_ms", "a lone request (ms)", aim=5, at_most=True).missed(5.7)
        'a lone request (ms): 5.7, aim ≤ 5'
        >>> Headline("serve", "lone_extra_ms", "the same (ms)", aim=5, at_most=True).missed(5.7)
        'the same (ms) (lone_extra_ms): 5.7, aim ≤ 5'
        """
        which = f" ({self.figure})" if self.says.startswith("the same") else ""  # since the row above is missing
        return f"{self.says}{which}: {_short(value)}, aim {self._aim()}"

    def _reaches(self, value: float, bound: float) -> bool:
        return value <= bound if self.at_most else value >= bound


def _read(path: Path) -> dict[str, tuple[Headline, ...]]:
    """The headlines under each heading."""
    sections = path.read_text().split("\n## ")[1:]
    return {title: tuple(map(_headline, lines)) for title, *lines in (each.strip().split("\n") for each in sections)}


def _headline(line: str) -> Headline:
    """
    >>> _headline("serve lone_extra_ms | a lone request (ms) | <= 5")
    Headline(claim='serve', figure='lone_extra_ms', says='a lone request (ms)', aim=5.0, at_most=True, paper=None)
    """
    name, says, aim, paper = (*map(str.strip, line.split("|")), "", "")[:4]
    (claim, figure), bound = name.split(), float(aim[2:]) if aim else None
    return Headline(claim, figure, says, bound, aim.startswith("<="), float(paper) if paper else None)


HEADLINES = _read(Path(__file__).with_suffix(".txt"))

# The figures in the table "Found" of docs/results.md, in its order: claim and figure.
FOUND = (
    ("planner", "s_96blocks_1000gpus"),
    ("bound", "promise_error_p90"),
    ("sim", "goodput_error_max"),
    ("real", "live_over_promise_constant_bfloat16"),
    ("real", "constant_over_no_exits_bfloat16"),
    ("real", "constant_over_early_exit_bfloat16"),
    ("real", "constant_over_early_exit_large_bfloat16"),
    ("real", "constant_over_ray_bfloat16"),
    ("real", "constant_over_ray_2_bfloat16"),
    ("peers", "exits_over_best_exits_minilm"),
    ("peers@zen3", "arrivals_exits_over_best_exits_random"),
    ("packing", "packed_over_padded_mixed_16"),
    ("decoding", "live_over_promise_recompute_bfloat16_1"),
    ("promise", "exceeded_share_sst2"),
    ("replan", "changes"),
    ("replan", "min_goodput_share"),
    ("chaos", "lost"),
    ("cluster", "lost"),
    ("fuzz", "honest_wrong"),
)


def command(claim: str) -> str:
    """
    >>> command("real"), command("decoding@amx"), command("soak")
    ('bench-real', 'bench-decoding on=amx', 'soak')
    """
    name, _, machine = claim.partition("@")
    target = name if name in ("chaos", "fuzz", "soak") else f"bench-{name}"
    return f"{target} on={machine}" if machine else target


def _short(value: float) -> str:
    """
    >>> _short(152360.0), _short(0.0266453), _short(0.0)
    ('152,400', '0.02665', '0')
    """
    return f"{float(f'{value:.4g}'):,.10g}"
