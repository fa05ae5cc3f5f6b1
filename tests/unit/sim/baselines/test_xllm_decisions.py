"""Pairs and flips are those of xllm-service's own code, step by step."""

from collections.abc import Callable, Iterator
from typing import Any

from poolwright.sim.baselines.xllm import Pair, Predictor, Scheduler
from poolwright_protocol.roles import Role


def replay(sequence: Any, flips_to_decode: bool) -> Iterator[tuple[bool, bool]]:
    """For each step: whether it scheduled a request, and whether pair and indexes are the recorded ones."""
    scheduler = Scheduler(*sequence["targets"], flips_to_decode)
    for i, coefficients in enumerate(sequence["profiles"]):
        scheduler.add(f"m{i}", Predictor(*coefficients), Role.PROMPT if i < sequence["prompt"] else Role.TOKEN)
    live: dict[int, list[Any]] = {}
    for (what, number, *numbers), chosen, prompts, decodes in sequence["steps"]:
        same = True
        if what == "s":
            pair, own = scheduler.schedule(numbers[0])
            live[number] = [pair, own, numbers[0]]
            same = pair == Pair(*chosen)
        elif what == "p":
            scheduler.prompt_done(*live[number][:2])
            live[number][2] += 1
        elif what == "g":
            scheduler.generated(live[number][0], numbers[0])
            live[number][2] += numbers[0]
        else:
            pair, _, tokens = live.pop(number)
            scheduler.ended(pair, tokens)
        yield what == "s", same and (scheduler.prompts, scheduler.decodes) == (prompts, decodes)


def test_pairs_and_indexes_are_those_of_xllm_service(recorded: Callable[[str], Any]) -> None:
    steps = [step for sequence in recorded("xllm-service-slo") for step in replay(sequence, flips_to_decode=False)]
    assert all(same for _, same in steps)
    assert sum(scheduled for scheduled, _ in steps) >= 1000


def test_a_flip_to_decode_that_works_is_the_only_difference(recorded: Callable[[str], Any]) -> None:
    """Up to the first one every decision is the service's; without any, all are."""
    differing = 0
    for sequence in recorded("xllm-service-slo"):
        same = [s for _, s in replay(sequence, flips_to_decode=True)]
        if not all(same):
            first = same.index(False)
            what, before, after = sequence["steps"][first][0][0], sequence["steps"][first - 1], sequence["steps"][first]
            # The service only moved the machine to the end of the same index.
            assert what == "s"
            assert sorted(before[2]) == sorted(after[2])
            differing += 1
    assert 0 < differing < 60
