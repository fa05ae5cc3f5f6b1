"""Repeats of one load, each kept as soon as it is there; a run that broke is said and tried again, a few times."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from bench.policy_agreement.client import Answer
from bench.policy_agreement.pool import busy_share, cpu_ticks
from bench.policy_agreement.store import Section

Say = Callable[[str], None]
_FAILURES = 2  # of one section


async def fill(
    section: Section,
    wanted: int,
    measure: Callable[[], Awaitable[list[Answer]]],
    save: Callable[[], None],
    say: Say,
    more: Callable[[float, float], dict[str, Any]] = lambda began, ended: {},
) -> None:
    """Until there are `wanted`. `more` adds to a repeat what was seen from one time to another."""
    failures = 0
    while len(section["repeats"]) < wanted:
        ticks, began = cpu_ticks(), time.monotonic()
        try:
            answers = await measure()
        except RuntimeError as error:
            failures += 1
            say(f"a repeat broke: {error}")
            if failures > _FAILURES:
                raise
            continue
        ended = time.monotonic()
        section["repeats"].append(
            {
                "answers": [[a.sent_seconds, a.prompt_tokens, [round(t, 6) for t in a.token_seconds]] for a in answers],
                "seconds": round(ended - began, 1),
                "cpu_share": round(busy_share(ticks, cpu_ticks()), 3),
                **more(began, ended),
            }
        )
        save()
        say(f"repeat {len(section['repeats'])} of {wanted}: {len(answers)} answers in {ended - began:.0f} s")


def answers_of(repeat: dict[str, Any]) -> list[Answer]:
    return [Answer(sent, prompt, tuple(tokens)) for sent, prompt, tokens in repeat["answers"]]
