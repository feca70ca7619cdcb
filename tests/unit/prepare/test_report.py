"""The sentences about a promise, about copies, and about ramps that outdo the network."""

import pytest

from isobatch.deployments.models.ramps import ExitRules, RampRule
from isobatch.deployments.prepare.report import advice, copies, outdone, promise_text
from isobatch.deployments.prepare.sample import Parts, Sample
from isobatch.profiles.promise import ExitPromise

TESTED = ExitPromise(metric="accuracy", max_loss=0.01, confidence=0.95, rows=120, lost=0.0, bound=0.0)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "120 inputs to test it on are too few to promise 1 %; give 855 rows or more, or allow 2.5 %"),
        ({"rows": 3000}, "the ramps err too often to promise 1 %; allow more, or try --ramp pooler"),
        ({"max_loss": 0.0}, "that nothing at all is lost can hardly be shown; allow a little"),
    ],
)
def test_the_reason_why_no_input_leaves_early(changed: dict[str, float], sentence: str) -> None:
    rules = ExitRules(mean_depth_share=1.0, promise=TESTED.model_copy(update=changed))
    assert advice(rules) == f"no input leaves early: {sentence}"


def test_inputs_of_the_rarest_class_decide_on_a_promise_about_classes() -> None:
    sentence = advice(ExitRules(mean_depth_share=1.0, promise=TESTED.model_copy(update={"counted": 30})))
    assert sentence
    assert "30 inputs of the rarest class to test it on are too few to promise 1 %" in sentence


def test_a_gain_that_few_inputs_have_shown_needs_no_more_of_them() -> None:
    gained = TESTED.model_copy(update={"rows": 105, "lost": -0.2})
    assert "must be tested" not in promise_text(gained)
    assert "must be tested" in promise_text(TESTED)


def test_many_copies_are_warned_of() -> None:
    assert copies(Sample(["a", "b", "a", "a"], None, Parts.of(4))) == (
        "only 2 of 4 inputs are different: the promise holds only if requests repeat as often; else leave copies out"
    )
    assert copies(Sample(["a", "b"], None, Parts.of(2))) is None


def test_a_ramp_that_outdoes_the_network_is_warned_of() -> None:
    ramps = (RampRule(block=0, threshold=0.9, accuracy=0.85), RampRule(block=1, threshold=0.9, accuracy=0.82))
    rules = ExitRules(ramps=ramps, full_accuracy=0.81, promise=TESTED.model_copy(update={"rows": 1400, "lost": -0.03}))
    assert outdone(rules) == (
        "the ramp after block 0 alone is right in 85.0%, the full network in 81.0%: was it trained for long enough?"
    )
    assert outdone(rules.model_copy(update={"full_accuracy": 0.84})) is None
