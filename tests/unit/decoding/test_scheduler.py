"""Who runs together, and when: with a network that says what it is told to."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from isobatch.deployments.decoding.engine import Engine
from isobatch.deployments.decoding.pages import PagePool
from isobatch.deployments.decoding.replica import ReplicaState
from isobatch.deployments.decoding.replica_group import summed
from isobatch.deployments.decoding.scheduler import DecodingLaunch, DecodingLimits, NoReplica, ReplicaFull, Scheduler
from isobatch.deployments.decoding.sequences import UNDEFINED, LaunchFailedError, Splits, TextRequest, TokenPrediction
from tests.helpers.tiny_decoders import Clock

PATIENT = DecodingLimits(max_residents=4, page_tokens=4, deep_share=0.5, ttft_s=1e9, tpot_s=1e9)
TWO = Splits((2, 6))


class Told:
    """A network whose ramp is sure of a sequence's next token if `sure` says so; the head is always sure."""

    def __init__(self, sure: Callable[[int], bool]) -> None:
        self.launches: list[DecodingLaunch] = []
        self._sure = sure
        self.dropped: list[int] = []

    def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]:
        self.launches.append(launch)
        return [
            [
                TokenPrediction(7, launch.split > 0 or self._sure(part.sequence.name))
                for _ in range(part.num_predictions)
            ]
            for part in launch.pieces
        ]

    def drop(self, name: int) -> None:
        self.dropped.append(name)

    def spoilt(self, pages: Iterable[int]) -> list[int]:
        return []

    def recut(self, splits: Splits) -> None:
        """It says the same wherever it is cut."""


def engine(network: Told, limits: DecodingLimits = PATIENT, pages: int = 1000, splits: Splits = TWO) -> Engine:
    return Engine(Scheduler(splits, limits, PagePool(pages)), network, Clock())


def open_texts(running: Engine, count: int, text: TextRequest) -> None:
    for _ in range(count):
        running.open(text)


def run_out(running: Engine) -> dict[int, int]:
    """How many tokens each sequence has written in the end."""
    written: dict[int, int] = {}
    while (news := running.step()) is not None:
        for each in news:
            written[each.name] = written.get(each.name, 0) + len(each.tokens)
    return written


def test_the_deep_split_runs_once_its_share_of_the_residents_waits() -> None:
    network = Told(sure=lambda name: name in (1, 2))
    running = engine(network)
    open_texts(running, 4, TextRequest((1,), 3))
    for _ in range(2):
        running.step()
    assert [(launch.split, len(launch.pieces)) for launch in network.launches] == [(0, 4), (1, 2)]


def test_other_limits_hold_at_once_and_nobody_begins_again() -> None:
    network = Told(sure=lambda name: name > 1)
    running = engine(network, replace(PATIENT, deep_share=1.0))
    open_texts(running, 4, TextRequest((1,), 3))
    running.step()
    running.recut(TWO, replace(PATIENT, max_residents=1, deep_share=0.25, page_tokens=99))
    running.step()
    assert [(launch.split, len(launch.pieces)) for launch in network.launches] == [(0, 4), (1, 1)]
    assert network.dropped == []
    assert running.scheduler.limits.page_tokens == PATIENT.page_tokens, "pages are those of the start"
    running.open(TextRequest((1,), 3))
    assert len(run_out(running)) == 5
    assert max(len(launch.pieces) for launch in network.launches[2:]) == 4, "the fifth waits until all others are gone"


def test_a_launch_has_the_room_that_there_was_when_it_ran() -> None:
    network = Told(sure=lambda _: True)
    running = engine(network, replace(PATIENT, max_residents=32))
    open_texts(running, 16, TextRequest((1,), 4))
    running.step()
    running.step()
    running.recut(TWO, replace(PATIENT, max_residents=16))
    running.step()
    launched = running.scheduler.launched
    assert launched == {0: (3, 3 * 16, 32 + 32 + 16)}
    state = ReplicaState(0, 0, 0, 0, 0, 0.0, {}, launched)
    assert summed([state, state], num_blocks=6)["splits"] == [{"split": 0, "launches": 6, "fill": 48 / 80}]


def test_another_cut_has_residents_begin_again_in_the_order_in_which_they_came() -> None:
    network = Told(sure=lambda name: True)
    running = engine(network, replace(PATIENT, max_residents=2))
    open_texts(running, 4, TextRequest((1,), 3))
    running.step()
    running.recut(Splits((4, 6)), PATIENT)
    assert sorted(network.dropped) == [1, 2]
    assert [one.name for one in running.scheduler.waiting] == [1, 2, 3, 4]
    assert running.scheduler.preempted == 0, "pages were not short"
    running.step()
    rows = {part.sequence.name: part.rows for part in network.launches[-1].pieces}
    assert rows == {1: 2, 2: 2, 3: 1, 4: 1}, "prompts, and what was written"
    assert run_out(running) == {1: 1, 2: 1, 3: 2, 4: 2}
    assert running.scheduler.launched.keys() == {0}


def test_the_deep_split_runs_when_nobody_else_can_go_on() -> None:
    network = Told(sure=lambda _: False)
    running = engine(network, DecodingLimits(max_residents=4, deep_share=1.0, ttft_s=1e9, tpot_s=1e9))
    running.open(TextRequest((1,), 2))
    assert run_out(running) == {1: 2}
    assert [launch.split for launch in network.launches] == [0, 1, 0, 1]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("verified", [False, True])
def test_where_the_numbers_of_a_ramp_overflow_the_full_network_writes_the_token(verified: bool, every: int) -> None:
    class Overflowing(Told):
        def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]:
            predicted = super().run(launch)
            if launch.split == 0 and len(self.launches) % every == 0:
                return [[replace(each, token=UNDEFINED) for each in row] for row in predicted]
            return predicted

        def spoilt(self, pages: Iterable[int]) -> list[int]:
            raise AssertionError("KV is not searched for every token of a text that goes on")

    running = engine(Overflowing(lambda _: True), splits=replace(TWO, verified=verified))
    running.open(TextRequest((1,), 6))
    assert run_out(running) == {1: 6}


def test_a_replica_whose_deep_split_fails_on_every_text_ends() -> None:
    class Failing(Told):
        def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]:
            if launch.split:
                raise LaunchFailedError("out of memory")
            return super().run(launch)

    running = engine(Failing(lambda _: False))
    for token in range(3):
        running.open(TextRequest((token,), 3))
    with pytest.raises(LaunchFailedError, match="out of memory"):
        run_out(running)


def test_a_token_that_would_be_late_hurries_the_deep_split_but_one_that_is_late_does_not() -> None:
    def splits(ttft_s: float) -> list[int]:
        network = Told(sure=lambda name: name != 1)
        running = engine(network, DecodingLimits(max_residents=8, deep_share=0.9, ttft_s=ttft_s, tpot_s=1e9))
        running.scheduler.pace.launched(1, 0.010)
        open_texts(running, 8, TextRequest((1,), 50))
        for _ in range(12):
            running.step()
        return [launch.split for launch in network.launches]

    assert 1 in splits(ttft_s=0.025)  # due 12 launches after it came, and a deep launch takes ten
    assert 1 not in splits(ttft_s=0.0085)  # over when the first launch has ended
    assert 0 in splits(ttft_s=0.0085)
    assert 1 not in splits(ttft_s=1e9)


def test_a_late_text_waits_before_a_deep_split_for_a_bounded_number_of_launches() -> None:
    """With projected KV nobody else goes there."""
    network = Told(sure=lambda name: name != 1)
    limits = DecodingLimits(max_residents=8, deep_share=0.9, ttft_s=0.0085, tpot_s=1e9)
    running = engine(network, limits, splits=replace(TWO, project=True, max_pending=8))
    open_texts(running, 8, TextRequest((1,), 50))
    for _ in range(12):
        running.step()
    assert [launch.split for launch in network.launches] == [0] * 9 + [1, 0, 0]


def test_a_text_that_does_not_fit_is_for_another_replica() -> None:
    """A front of the deployment before may know of more memory."""
    running = engine(Told(lambda _: True), pages=2)
    assert isinstance(running.open(TextRequest((1,), 8)), NoReplica)
    assert isinstance(running.open(TextRequest((1,), 8, replayed=(0,))), NoReplica)
    assert running.open(TextRequest((1,), 7)) == 1


@pytest.mark.parametrize("deep_s", [0.0, 0.002])
def test_a_token_hurries_the_deep_split_before_a_launch_after_which_it_would_be_late(deep_s: float) -> None:
    """The deep split takes less time than the first one, or has not run yet."""
    clock = Clock(step_s=0.0)

    class Slow(Told):
        def run(self, launch: DecodingLaunch) -> list[list[TokenPrediction]]:
            clock.now_s += 0.002 if launch.split else 0.05
            return super().run(launch)

    network = Slow(sure=lambda name: name != 1)
    limits = DecodingLimits(max_residents=8, deep_share=0.9, ttft_s=0.24, tpot_s=1e9)
    running = Engine(Scheduler(TWO, limits, PagePool(1000)), network, clock)
    if deep_s:
        running.scheduler.pace.launched(1, deep_s)
    open_texts(running, 8, TextRequest((1,), 50))
    written: list[int] = []
    while 1 not in written:
        written += [each.name for each in running.step() or ()]
    assert [launch.split for launch in network.launches] == [0, 0, 0, 0, 1]
    assert clock.now_s == pytest.approx(0.202), "it is due at 0.24, and would have come at 0.252"


def test_where_nothing_is_written_there_are_no_tokens_per_second() -> None:
    running = engine(Told(lambda _: True))
    running.open(TextRequest((1,), 3))
    running.step()
    assert running.scheduler.tokens_per_s > 0
    run_out(running)
    assert running.scheduler.tokens_per_s == 0


def test_what_an_encoder_reads_takes_pages_too() -> None:
    running = engine(Told(lambda _: False), pages=5)
    open_texts(running, 3, TextRequest((0,), 3, source=(1,) * 9))
    running.step()
    assert len(running.scheduler.residents) == 1  # three pages in each block, one to write on, and one to go on
    assert running.scheduler.pool.free == 5 - (3 + 1)
    assert run_out(running) == {1: 3, 2: 3, 3: 3}
    assert running.scheduler.pool.free == 5
    assert isinstance(running.open(TextRequest((0,), 3, source=(1,) * 17)), NoReplica)


def test_a_sequence_waits_for_pages_rather_than_put_another_out() -> None:
    network = Told(lambda _: False)
    running = engine(network, pages=5)
    open_texts(running, 3, TextRequest((1,) * 5, 3))
    running.step()
    assert len(running.scheduler.residents) == 1  # needs two pages in each block, and one to go on
    assert run_out(running) == {1: 3, 2: 3, 3: 3}
    assert running.scheduler.preempted == 0


def test_who_came_last_is_put_out_when_pages_run_short_and_loses_nothing() -> None:
    network = Told(lambda name: name % 2 == 0)
    running = engine(network, pages=8)
    open_texts(running, 4, TextRequest((1, 2), 20))
    assert run_out(running) == dict.fromkeys(range(1, 5), 20)
    assert running.scheduler.preempted > 0
    assert running.scheduler.pool.free == 8


def test_it_is_full_when_one_more_would_wait_longer_than_promised() -> None:
    limits = DecodingLimits(max_residents=2, max_waiting=3, ttft_s=1.0, tpot_s=1e9)
    running = engine(Told(lambda _: True), limits)
    for _ in range(2 + 3):
        assert not isinstance(running.open(TextRequest((1,), 1)), ReplicaFull)
    assert isinstance(running.open(TextRequest((1,), 1)), ReplicaFull)  # two have a place, and three wait for one
    running.step()
    open_texts(running, 2, TextRequest((1,), 1))
    assert isinstance(running.open(TextRequest((1,), 1)), ReplicaFull)  # two texts ended, so two came
    run_out(running)
    running.scheduler.pace.residence_s = 4.0
    open_texts(running, 2, TextRequest((1,), 9))
    refused = running.open(TextRequest((1,), 9))
    assert isinstance(refused, ReplicaFull)
    assert refused.retry_after_s == pytest.approx(2.0)  # half a residence: there are two places


def test_texts_that_come_together_do_not_wait_while_there_are_places() -> None:
    """Over HTTP they may have come in one request, as several texts for a prompt."""
    running = engine(Told(lambda _: True), replace(PATIENT, max_waiting=1))
    running.open(TextRequest((1,), 9))
    running.step()
    assert [running.open(TextRequest((1,), 9)) for _ in range(4)] == [2, 3, 4, 5]
    assert isinstance(running.open(TextRequest((1,), 9)), ReplicaFull)


def test_texts_that_the_front_ends_tell_how_long_texts_stay() -> None:
    running = engine(Told(lambda _: True), replace(PATIENT, max_residents=1))
    open_texts(running, 3, TextRequest((1,), 9))
    running.step()
    running.cancel(2)  # it waits, and has stayed nowhere
    assert running.scheduler.pace.residence_s == 0.0
    running.cancel(1)
    stayed_s = running.scheduler.pace.residence_s
    assert stayed_s > 0.0
    running.scheduler.next(0.0)
    running.cancel(3)  # nothing of it was written: its client went away
    assert running.scheduler.pace.residence_s == stayed_s


def test_it_is_full_where_pages_and_not_places_make_others_wait() -> None:
    running = engine(Told(lambda _: True), DecodingLimits(max_residents=32, page_tokens=4), pages=4)
    running.scheduler.pace.sequence_ended(10.0)
    for _ in range(3):
        assert not isinstance(running.open(TextRequest((1,), 3)), ReplicaFull), "nobody has had to wait yet"
    running.scheduler.next(0.0)
    assert (len(running.scheduler.residents), len(running.scheduler.waiting)) == (2, 1)
    assert running.scheduler.refusal() == ReplicaFull(10.0), "both have to end: one for who waits, one for who comes"


def test_a_text_that_has_waited_in_vain_is_refused_and_one_that_goes_on_is_not() -> None:
    limits = DecodingLimits(max_residents=1, page_tokens=4, ttft_s=1.0, tpot_s=1e9)
    scheduler = engine(Told(lambda _: True), limits).scheduler
    first, late, continued, young = (
        scheduler.add(TextRequest((1,), 9, replayed=replayed), arrived_s)
        for arrived_s, replayed in ((0.0, ()), (0.1, ()), (0.1, (5,)), (1.9, ()))
    )
    scheduler.next(0.0)
    assert list(scheduler.residents) == [first]
    scheduler.cancel(first, 2.0)
    scheduler.next(2.0)
    assert [name for name, _ in scheduler.take_late()] == [late]
    assert list(scheduler.residents) == [continued]
    scheduler.cancel(continued, 2.1)
    scheduler.next(2.1)
    assert (scheduler.take_late(), list(scheduler.residents)) == ([], [young])


def test_a_text_that_loses_its_place_before_its_first_token_is_not_refused() -> None:
    limits = DecodingLimits(max_residents=1, page_tokens=4, ttft_s=1.0, tpot_s=1e9)
    scheduler = engine(Told(lambda _: True), limits).scheduler
    name = scheduler.add(TextRequest((1,), 9), 0.0)
    scheduler.next(0.0)
    scheduler.recut(Splits((3, 6)), limits)
    assert [each.name for each in scheduler.waiting] == [name]
    scheduler.next(2.0)
    assert (scheduler.take_late(), list(scheduler.residents)) == ([], [name])


def test_late_texts_are_refused_although_no_place_is_free_and_no_text_has_ended() -> None:
    limits = DecodingLimits(max_residents=2, page_tokens=4, ttft_s=1.0, tpot_s=1e9)
    scheduler = engine(Told(lambda _: True), limits).scheduler
    names = [scheduler.add(TextRequest((1,), 900, replayed=replayed), 0.0) for replayed in ((), (), (), (5,), ())]
    scheduler.next(0.0)
    young = scheduler.add(TextRequest((1,), 9), 0.9)
    scheduler.next(0.9)
    assert not scheduler.take_late()
    scheduler.next(1.1)
    late = [names[2], names[4]]
    assert scheduler.take_late() == [(name, ReplicaFull(pytest.approx(3 * 1.1 / 2))) for name in late]
    assert [each.name for each in scheduler.waiting] == [names[3], young]
    assert scheduler.refusal() == ReplicaFull(pytest.approx(3 * 1.1 / 2))


def test_the_age_of_a_text_counts_before_it_is_let_in() -> None:
    running = engine(Told(lambda _: True), DecodingLimits(max_residents=1, ttft_s=1.0, tpot_s=1e9))
    assert running.open(TextRequest((1,), 9), age_s=0.9) == 1, "there is a place"
    running.scheduler.next(0.0)
    running.scheduler.pace.sequence_ended(0.5)
    assert isinstance(running.open(TextRequest((1,), 9), age_s=0.6), ReplicaFull)
    assert running.open(TextRequest((1,), 9), age_s=0.4) == 2


def test_a_text_that_goes_on_is_never_refused() -> None:
    """Its client has read a part, and new texts would take each place before it comes again."""
    running = engine(Told(lambda _: True), DecodingLimits(max_residents=1, max_waiting=1, ttft_s=1.0, tpot_s=1e9))
    new, continued = TextRequest((1,), 9), TextRequest((1, 7), 8, replayed=(5,))
    open_texts(running, 2, new)
    assert isinstance(running.open(new), ReplicaFull)
    names = [running.open(continued, age_s=100.0) for _ in range(3)]
    assert [each.name for each in running.scheduler.waiting] == [1, 2, *names]
    assert run_out(running) == {1: 9, 2: 9, **dict.fromkeys(names, 8)}


def test_nobody_comes_in_while_tokens_come_too_slowly() -> None:
    running = engine(Told(lambda _: True), DecodingLimits(max_residents=8, ttft_s=1e9, tpot_s=0.1))
    running.open(TextRequest((1,), 9))
    running.scheduler.next(0.0)
    running.scheduler.pace.tokens_written(tokens=35, took_s=1.0)
    open_texts(running, 7, TextRequest((1,), 9))
    running.scheduler.next(0.0)
    assert len(running.scheduler.residents) == 4  # at this speed three have ten tokens a second each, and four do not


def test_an_idle_replica_takes_a_crowd_however_slowly_one_text_was_written() -> None:
    running = engine(Told(lambda _: True), DecodingLimits(max_residents=8, ttft_s=1e9, tpot_s=0.1))
    running.scheduler.pace.tokens_written(tokens=20, took_s=1.0)
    open_texts(running, 8, TextRequest((1,), 9))
    running.scheduler.next(0.0)
    assert len(running.scheduler.residents) == 8


def test_a_long_prompt_runs_in_pieces_beside_those_who_decode() -> None:
    network = Told(lambda _: True)
    limits = DecodingLimits(max_residents=4, prompt_rows=8, deep_share=0.5, ttft_s=1e9, tpot_s=1e9)
    running = engine(network, limits, splits=Splits((6,), max_pending=2))
    running.open(TextRequest((1,), 5))
    running.open(TextRequest((1,) * 20, 1))
    run_out(running)
    assert [sorted(part.rows for part in launch.pieces) for launch in network.launches] == [
        [1, 8], [1, 8], [1, 4], [1], [1],
    ]  # fmt: skip
