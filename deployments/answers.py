"""What goes to the user for one input, and why an input may get no answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One input's label, and what happened to it on the way."""

    label: int
    name: str  # what the checkpoint calls that label
    score: float  # the probability of `label`, after calibration
    exit_block: int  # the block it left after
    queued_ms: float
    computed_ms: float  # from the start of its batch until it left


class RefusedError(Exception):
    """A request that gets no answer: the HTTP status, and one sentence that names the value."""

    def __init__(self, status: int, sentence: str, retry_after_s: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.retry_after_s = retry_after_s
