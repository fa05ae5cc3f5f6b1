"""What lies between client, router and machines, measured on an idle pool, as the simulator's `Network`.

Lone requests, with steps whose times are known: what is left of a time is the way. It is measured once, before any
load, and on no run that is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.policy_agreement.client import Answer, Wanted

from poolwright.sim.network import Network
from poolwright.sim.step_time import Chunk, StepTime

_ANSWER_TOKENS = 4
_NEVER_LAYERED = 1 << 30  # an engine sends the KV of a step when the step has ended


def lone_requests(prompts: Sequence[int], rounds: int) -> list[Wanted]:
    """Prompts of these lengths, each computed in one step, in turns."""
    return [Wanted(0.0, prompt, _ANSWER_TOKENS) for _ in range(rounds) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Ways:
    """Seconds that lone requests took beyond their steps. `whole_first`: to the first token on one machine;
    `split_first`: over two; `handoff`: from there to the second, without bytes; `bytes_per_second` of the KV."""

    whole_first_seconds: float
    split_first_seconds: float
    handoff_seconds: float
    bytes_per_second: float

    def network(self) -> Network:
        """The simulator has one message more before the prompt where it is split, and one after its KV."""
        message = max(0.0, self.split_first_seconds - self.whole_first_seconds)
        return Network(
            self.bytes_per_second,
            message_seconds=message,
            serial_below_tokens=_NEVER_LAYERED,
            client_seconds=max(0.0, self.whole_first_seconds - message),
            handoff_seconds=max(0.0, self.handoff_seconds - message),
            reads_behind_steps=True,
        )


def ways(whole: Sequence[Answer], split: Sequence[Answer], step_time: StepTime, kv_bytes_per_token: int) -> Ways:
    """Of answers to `lone_requests` on one machine and over two. Medians; two lengths of prompts tell what bytes take
    from what the rest takes."""
    handoffs = {
        tokens: median(_second(answer, step_time) for answer in split if answer.prompt_tokens == tokens)
        for tokens in sorted({answer.prompt_tokens for answer in split})
    }
    short, long = min(handoffs), max(handoffs)
    slope = max(1e-12, (handoffs[long] - handoffs[short]) / (long - short))
    return Ways(
        whole_first_seconds=median(_first(answer, step_time) for answer in whole),
        split_first_seconds=median(_first(answer, step_time) for answer in split),
        handoff_seconds=max(0.0, handoffs[short] - slope * short),
        bytes_per_second=kv_bytes_per_token / slope,
    )


def _first(answer: Answer, step_time: StepTime) -> float:
    return answer.ttft_seconds - step_time.seconds((Chunk(0, answer.prompt_tokens),), 0, 0)


def _second(answer: Answer, step_time: StepTime) -> float:
    return answer.gap_seconds[0] - step_time.seconds((), 1, answer.prompt_tokens + 1)
