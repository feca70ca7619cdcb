"""Exit policies: functions that decide which inputs leave at a ramp. Their names are import paths, as in
`isobatch.deployments.exits:entropy`.

A policy gets the ramp's (calibrated) logits of a batch, the ramp's threshold, and what it remembers of each input. Its
decision for one input never depends on the others, so an input leaves at the same ramp in any batch. Requests for the
best scores are the exception. Where each word or each label is answered by itself, a policy decides on each of them,
and an input leaves with all of them.

- Independent policies decide from this ramp alone: `entropy`, `confidence`, `margin`.
- Of networks that give heat maps: `five_best`.
- Of networks with one output: `near`, `near_number`. `near` also lets inputs of a request for the best scores leave
  when they can no longer be among them.
- Dependent ones remember earlier ramps: `patience`, `voting`. Their memory is sent along with each survivor.

Your own policy is a function with this signature anywhere on the import path. Decorate it with `remembers` if it has a
memory, and with `takes` so that thresholds are searched in its range (example: examples/own_policy.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decision:
    """For each input: whether it leaves, the logits of its answer, and what to remember of it if it stays."""

    leaves: Tensor
    answer: Tensor
    memory: Tensor


class Policy(Protocol):
    def __call__(self, logits: Tensor, threshold: float, memory: Tensor) -> Decision: ...


AnyPolicy = TypeVar("AnyPolicy", bound=Callable[..., Decision])


@dataclass(frozen=True)
class Range:
    """The range of a policy's thresholds. `low` may depend on the number of labels, `high` on the number of ramps.

    `leaves_below`: an input leaves when its value is below the threshold, not above. `whole`: the values are counts, so
    a threshold between two whole numbers acts as the upper one.
    """

    low: Callable[[int], float]
    high: Callable[[int], float]
    leaves_below: bool = False
    whole: bool = False


def takes(values: Range) -> Callable[[AnyPolicy], AnyPolicy]:
    """Declare a policy's range: thresholds are searched in it, and one that fires never or always is reported."""

    def declare(policy: AnyPolicy) -> AnyPolicy:
        policy.__dict__["values"] = values
        return policy

    return declare


def remembers(width: Callable[[int], int]) -> Callable[[AnyPolicy], AnyPolicy]:
    """Declare how many numbers a policy remembers of each input, given the number of labels. They start at 0."""

    def declare(policy: AnyPolicy) -> AnyPolicy:
        policy.__dict__["memory_width"] = width
        return policy

    return declare


def remembers_best(policy: AnyPolicy) -> AnyPolicy:
    """Declare that a policy remembers a `BestOf` of each input. It needs no other ramp for that."""
    policy.__dict__["remembers_best"] = True
    return remembers(lambda num_labels: len(BestOf._fields))(policy)


def knows_best(policy: Policy) -> bool:
    return hasattr(policy, "remembers_best")


def forgets(policy: Policy) -> bool:
    """Whether a policy decides from one ramp alone."""
    return memory_width(policy, num_labels=2) == 0 or knows_best(policy)


def memory_width(policy: Policy, num_labels: int) -> int:
    """
    >>> memory_width(entropy, 10), memory_width(patience, 10), memory_width(voting, 10)
    (0, 2, 10)
    """
    width = cast(Callable[[int], int] | None, getattr(policy, "memory_width", None))
    return width(num_labels) if width else 0


def name_of(policy: Policy) -> str:
    """A policy's name, for messages: one may be an object without a name."""
    return getattr(policy, "__name__", str(policy))


def range_of(policy: Policy) -> Range | None:
    """The declared range; None: the policy declares none."""
    return cast(Range | None, getattr(policy, "values", None))


USUAL = "sometimes"  # the reach of a threshold that splits the inputs


def reach(policy: Policy, threshold: float, num_labels: int, num_ramps: int) -> str:
    """Whether a threshold fires "never", "always" or "sometimes", by the policy's declared range.

    >>> reach(entropy, 0.4, num_labels=2, num_ramps=11), reach(confidence, 0.5, num_labels=2, num_ramps=11)
    ('sometimes', 'always')
    >>> reach(patience, 12, num_labels=2, num_ramps=11)
    'never'
    """
    values = range_of(policy)
    if values is None:
        return USUAL
    low, high = values.low(num_labels), values.high(num_ramps)
    always, never = (
        (threshold > high, threshold <= low) if values.leaves_below else (threshold <= low, threshold > high)
    )
    return "always" if always else "never" if never else USUAL


def yes_or_no(logits: Tensor) -> Tensor:
    """Each label of each input as a row of its own, of two answers: no (logit 0) and yes.

    >>> yes_or_no(torch.tensor([[1.0, -2.0]])).tolist()
    [[0.0, 1.0], [0.0, -2.0]]
    """
    return torch.stack((torch.zeros_like(logits), logits), dim=2).flatten(0, 1)


@takes(Range(low=lambda labels: 0.0, high=lambda ramps: 1.0, leaves_below=True))
def entropy(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave when the normalised entropy (0: sure, 1: uniform) is below the threshold, as in DeeBERT and BranchyNet."""
    log_p = logits.log_softmax(dim=1)
    normalised = -(log_p.exp() * log_p).sum(dim=1) / math.log(logits.shape[1])
    return Decision(normalised < threshold, logits, memory)


@takes(Range(low=lambda labels: 1.0 / labels, high=lambda ramps: 1.0))
def confidence(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave when the most probable label has at least this probability."""
    return Decision(logits.softmax(dim=1).amax(dim=1) >= threshold, logits, memory)


@takes(Range(low=lambda labels: 0.0, high=lambda ramps: 1.0))
def margin(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave when the two most probable labels are at least this far apart in probability."""
    best = logits.softmax(dim=1).topk(2, dim=1).values
    return Decision(best[:, 0] - best[:, 1] >= threshold, logits, memory)


@takes(Range(low=lambda labels: 1.0, high=lambda ramps: float(ramps), whole=True))
@remembers(lambda num_labels: 2)
def patience(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave when `threshold` ramps in a row gave the same label, as in PABEE. Remembers label and run length."""
    label = logits.argmax(dim=1).to(memory.dtype)
    last, run = memory.unbind(dim=1)
    run = torch.where((run > 0) & (label == last), run + 1, 1.0)
    return Decision(run >= threshold, logits, torch.stack((label, run), dim=1))


@takes(Range(low=lambda labels: 1.0, high=lambda ramps: float(ramps), whole=True))
@remembers(lambda num_labels: num_labels)
def voting(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave when `threshold` ramps have voted for one label, which is the answer. Remembers the votes for each label.

    The answer's probabilities are the shares of the votes, plus one vote that is split by this ramp's probabilities: it
    breaks ties in favour of the deepest ramp.
    """
    votes = memory + torch.nn.functional.one_hot(logits.argmax(dim=1), logits.shape[1]).to(memory.dtype)
    shares = (votes + logits.softmax(dim=1)) / (votes.sum(dim=1, keepdim=True) + 1)
    return Decision(votes.amax(dim=1) >= threshold, shares.log(), votes)


BEST = 5  # numbers of a heat map


@takes(Range(low=lambda labels: 0.0, high=lambda ramps: 1.0))
def five_best(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave when the mean of the five largest numbers of a heat map is at least this, as in PAME."""
    best = logits.topk(min(BEST, logits.shape[1]), dim=1, sorted=False).values
    return Decision(best.mean(dim=1) >= threshold, logits, memory)


SCORE_STEP = 0.01  # is added to the slope of the sigmoid, which is nearly 0 at sure scores: they move, too


def slope(score: Tensor) -> Tensor:
    """The unit in which ramps predict how far a score will move: the slope of the sigmoid there, and `SCORE_STEP`."""
    return score * (1 - score) + SCORE_STEP


class BestOf(NamedTuple):
    """What is remembered of inputs whose request wants only its best scores, a row for each.

    `requests` are the numbers of their requests, and `wanted` how many scores each wants (0: all). `bars`: a score that
    at least this number of the request's scores will probably exceed.
    """

    requests: Tensor
    wanted: Tensor
    bars: Tensor

    def raised(self, lows: Tensor) -> Tensor:
        """The bars, where the scores of this batch will probably be above `lows`."""
        order = lows.argsort(descending=True)
        order = order[self.requests[order].argsort(stable=True)]
        requests, own = self.requests[order], self.requests.contiguous()
        last = torch.searchsorted(requests, own) + self.wanted.long() - 1
        is_there = (self.wanted > 0) & (last < torch.searchsorted(requests, own, right=True))
        return torch.where(is_there, lows[order[last.clamp(0, len(lows) - 1)]], self.bars).maximum(self.bars)


@takes(Range(low=lambda labels: 0.0, high=lambda ramps: 1.0, leaves_below=True))
@remembers_best
def near(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave when the last block's score will probably be within the threshold of this one, or below the best ones.

    A ramp gives two numbers: the logit of the score, and the logarithm of how far the last block's will be from it.
    """
    score = logits[:, 0].sigmoid()
    distance = (logits[:, 1].exp() * slope(score)).clamp(max=1.0)
    leaves = distance < threshold
    # Most launches hold no such request. To ask a GPU whether one does takes longer than to compute.
    if memory.shape[1] and (memory.device.type != "cpu" or memory[:, 1].any()):
        best = BestOf(*memory.unbind(dim=1))
        bars = best.raised(score - distance)
        leaves, memory = leaves | (score + distance < bars), torch.stack((*best[:2], bars), dim=1)
    return Decision(leaves, logits[:, :1], memory)


@takes(Range(low=lambda labels: 0.0, high=lambda ramps: 1.0, leaves_below=True))
def near_number(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """As `near`, for an output that is no logit. The distance and the threshold are shares of the scores' range."""
    return Decision(logits[:, 1].exp().clamp(max=1.0) < threshold, logits[:, :1], memory)
