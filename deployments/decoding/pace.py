"""The recent speed of a replica: the time of a launch, tokens per second, and how long sequences stay."""

from collections import defaultdict

RECENT = 0.05  # the weight of the latest launch or sequence in a running mean
SPREADS = 3.0  # mean deviations above the mean: hardly any time is longer
RECENT_S = 2.0  # the time over which tokens per second are averaged


class Pace:
    """Running means. Before anything is measured, every time is 0, so that no sequence is refused without a reason."""

    def __init__(self) -> None:
        self._launch_s: dict[int, float] = defaultdict(float)
        self.residence_s = 0.0
        self._begins_s = self._begins_spread_s = 0.0  # from becoming a resident to the first token
        self._tokens = self._seconds = 0.0

    def launched(self, split: int, took_s: float) -> None:
        self._launch_s[split] = _mean(self._launch_s[split], took_s)

    def launch_s(self, split: int) -> float:
        return self._launch_s[split]

    def forget_launches(self) -> None:
        """Forget the times of launches: the network is cut elsewhere."""
        self._launch_s.clear()

    def sequence_ended(self, stayed_s: float) -> None:
        self.residence_s = _mean(self.residence_s, stayed_s)

    def sequence_began(self, took_s: float) -> None:
        """A sequence has its first token, which took this time since it became a resident."""
        self._begins_spread_s = _mean(self._begins_spread_s, abs(took_s - self._begins_s)) if self._begins_s else 0.0
        self._begins_s = _mean(self._begins_s, took_s)

    @property
    def begins_s(self) -> float:
        """The time in which nearly all residents have their first token."""
        return self._begins_s + SPREADS * self._begins_spread_s

    def tokens_written(self, tokens: int, took_s: float) -> None:
        weight = max(0.0, 1.0 - took_s / RECENT_S)
        self._tokens = weight * self._tokens + tokens
        self._seconds = weight * self._seconds + took_s

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def tpot_s(self, residents: int) -> float:
        """The time from one token of a sequence to its next, with this number of residents at the present speed.

        A launch with more sequences writes more tokens, so this is no forecast for more residents than there are now.
        """
        return residents / self.tokens_per_s if self._tokens else 0.0


def _mean(before: float, latest: float) -> float:
    return before + RECENT * (latest - before) if before else latest
