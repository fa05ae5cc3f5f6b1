"""Guesses from the text itself change how many steps an answer takes, and nothing else."""

import pytest

from poolwright_engine.scheduling.ngrams import NgramIndex
from poolwright_engine.scheduling.runner import StepResult
from poolwright_engine.scheduling.scheduler import Scheduler
from poolwright_engine.scheduling.sequence import FinishReason, Sequence
from support.scheduler_bed import SchedulerBed, request


@pytest.mark.parametrize(
    ("text", "count", "guess"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], 2, (9, 8)),
        ([1, 2, 3, 9, 8, 7, 2, 3], 9, (9, 8, 7, 2, 3)),
        ([5, 2, 3, 4, 1, 2, 3, 6, 2, 3], 1, (6,)),  # the latest that fits
        ([5, 1, 2, 3, 4, 6, 2, 3, 7, 1, 2, 3], 1, (4,)),  # but a longer run says more
        ([1, 2, 3, 4], 3, ()),
        ([1, 1], 3, ()),
        ([3], 3, ()),
    ],
)
def test_a_guess_is_what_followed_the_same_tokens_before(text: list[int], count: int, guess: tuple[int, ...]) -> None:
    index = NgramIndex(text[:2])
    index.extend(text[2:])
    assert index.guess(count) == guess
    assert len(index) == len(text)


class Loops:
    """A model that says the same over and over, so that guesses come true."""

    def __init__(self, period: int) -> None:
        self._period = period

    def result(self, it: Scheduler, number: int) -> StepResult | None:
        step = it.schedule(number).step
        if step is None:
            return None
        tokens = []
        for context, row in zip(step.contexts, step.rows, strict=True):
            told: list[int] = []
            for guess in (*row.token_ids[row.length - row.num_draft :], None):
                told.append((context - row.num_draft + len(told)) % self._period + 1)
                if told[-1] != guess:
                    break
            tokens.append(tuple(told) if row.samples else ())
        return StepResult(number, tuple(tokens), ((),) * len(tokens), 0.0)


def test_guesses_that_come_true_save_steps_and_end_where_the_request_does() -> None:
    bed = SchedulerBed(speculative_ngram_tokens=4)
    one = Sequence(request([p % 5 + 1 for p in range(20)], 23))
    bed.it.add(one)
    model, heard, steps = Loops(5), [], 0
    while True:
        result = model.result(bed.it, steps)
        if result is None:
            break
        heard += bed.it.update(result)
        bed.it.check()
        steps += 1
    assert one.output_ids == [p % 5 + 1 for p in range(20, 43)]
    assert steps <= 9  # 2 of the prompt, then up to 5 tokens each, fewer before a new block
    assert heard[-1][1].finish_reason is FinishReason.LENGTH
    bed.check_empty()


def test_a_stop_among_guesses_that_came_true_ends_the_answer_there() -> None:
    bed = SchedulerBed(speculative_ngram_tokens=4)
    one = Sequence(request([p % 5 + 1 for p in range(22)], 40, stop_token_ids=(2,)))
    bed.it.add(one)
    model, heard, steps = Loops(5), [], 0
    while (result := model.result(bed.it, steps)) is not None:
        heard += bed.it.update(result)
        steps += 1
    assert one.output_ids == [3, 4, 5, 1, 2]
    assert heard[-1][1].token_ids[-1] == 2
    assert heard[-1][1].stop_token_id == 2
    bed.check_empty()


def test_an_answer_with_guesses_is_the_answer_without() -> None:
    for guesses in (0, 1, 4):
        bed = SchedulerBed(num_blocks=40, speculative_ngram_tokens=guesses, max_num_seqs=4)
        for number in range(8):
            bed.add(request([1, 2, 0] * 8 + [number], 20, arrival=number, temperature=1.0, seed=number, top_k=3))
        bed.run(depth=bed.it.config.steps_in_flight)
        bed.check_answers()
        steps = [d.step for d in bed.decisions if d.step]
        assert bool(sum(row.num_draft for step in steps for row in step.rows)) == bool(guesses)
        told = [len(output.token_ids) for outputs in bed.outputs.values() for output in outputs]
        assert (max(told) > 1) == bool(guesses)


def test_guesses_cost_budget_but_never_that_of_another_decode() -> None:
    bed = SchedulerBed(speculative_ngram_tokens=8, max_num_batched_tokens=8, max_num_seqs=4)
    group = [bed.add(request([1, 2, 0, 1, 2, 0, 1], 40, arrival=n, seed=n, top_k=3)) for n in range(4)]
    while any(s.is_prefilling for s in group):
        bed.turn(depth=1)
    guessed = 0
    for _ in range(12):
        decision = bed.turn(depth=1)
        assert decision.step is not None
        assert decision.step.num_tokens <= 8
        assert len(decision.step.rows) == 4
        guessed += decision.step.num_tokens - 4
    assert guessed
    bed.run()
    bed.check_answers()


def test_a_sequence_that_may_guess_is_not_scheduled_before_its_last_token_is_known() -> None:
    bed = SchedulerBed(speculative_ngram_tokens=2)
    assert bed.it.config.steps_in_flight == 1
    bed.add(request(range(1, 5), 9))
    bed.step()
    assert bed.step().step is None
    bed.read()
    assert bed.step().step is not None
    bed.run()
    bed.check_answers()
