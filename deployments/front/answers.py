"""What goes to the user for one input, and why an input may get no answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One launch that an input took part in."""

    block: int  # the first it ran
    queued_ms: float  # since the step before, or since it was admitted
    computed_ms: float  # from the start of the launch until it left or the launch ended


@dataclass(frozen=True)
class Answer:
    """One input's label, and what happened to it on the way."""

    label: int
    score: float  # the probability of `label`, after calibration
    exit_block: int  # the block it left after
    steps: tuple[Step, ...]

    @property
    def queued_ms(self) -> float:
        return sum(step.queued_ms for step in self.steps)

    @property
    def computed_ms(self) -> float:
        """
        >>> Answer(7, 0.9, 3, (Step(0, 1.0, 2.0), Step(2, 0.5, 3.0))).computed_ms
        5.0
        """
        return sum(step.computed_ms for step in self.steps)


class RefusedError(Exception):
    """A request that gets no answer: the HTTP status, and one sentence that names the value."""

    def __init__(self, status: int, sentence: str, retry_after_s: int | None = None) -> None:
        super().__init__(status, sentence, retry_after_s)  # all of it, so that it can be pickled
        self.status = status
        self.sentence = sentence
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.sentence
