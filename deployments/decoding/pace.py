"""How fast a replica is of late: what a launch takes, how often tokens come, how long sequences stay."""

from collections import defaultdict

RECENT = 0.05  # the weight of the latest launch or sequence
RECENT_S = 2.0  # tokens per second are over about so long


class Pace:
    """Running means. Before anything was measured, every time is 0: nothing is refused for what nobody knows."""

    def __init__(self) -> None:
        self._launch_s: dict[int, float] = defaultdict(float)
        self.residence_s = 0.0
        self._tokens = self._seconds = 0.0

    def launched(self, split: int, took_s: float) -> None:
        self._launch_s[split] = _mean(self._launch_s[split], took_s)

    def launch_s(self, split: int) -> float:
        return self._launch_s[split]

    def cut_anew(self) -> None:
        """Launches are others from now on."""
        self._launch_s.clear()

    def left(self, stayed_s: float) -> None:
        """A sequence ended after so long on the replica."""
        self.residence_s = _mean(self.residence_s, stayed_s)

    def wrote(self, tokens: int, took_s: float) -> None:
        kept = max(0.0, 1.0 - took_s / RECENT_S)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + took_s

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def tpot_s(self, residents: int) -> float:
        """The time from one token of a sequence to its next, with so many residents at the present speed. Launches with
        more sequences write more tokens, so it tells nothing about others who are yet to come."""
        return residents / self.tokens_per_s if self._tokens else 0.0


def _mean(before: float, latest: float) -> float:
    return before + RECENT * (latest - before) if before else latest
