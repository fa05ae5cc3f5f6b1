"""The simulator, given what the client sent: the same arrivals, lengths, roles, router and engine options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from bench.policy_agreement.client import Answer

from poolwright.sim.measures import gap_arrays
from poolwright.sim.network import Network
from poolwright.sim.ours import Options, ours
from poolwright.sim.policy import Policy, Setting, Slo
from poolwright.sim.request import Request, Trace
from poolwright.sim.simulation import Conditions, simulate
from poolwright.sim.step_time import MachineModel
from poolwright_protocol.roles import Role

_NO_SLO = Slo(ttft_seconds=1e6, tbt_seconds=1e6)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Of every engine: `max_num_batched_tokens` and `max_num_seqs`."""

    step_tokens: int
    most_streams: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """In seconds: of each request, and of every gap between two tokens of one."""

    ttft: tuple[float, ...]
    tbt: tuple[float, ...]


def seen(answers: Sequence[Answer]) -> Latencies:
    return Latencies(
        tuple(answer.ttft_seconds for answer in answers), tuple(gap for answer in answers for gap in answer.gap_seconds)
    )


def simulated(
    answers: Sequence[Answer],
    roles: Sequence[Role],
    model: MachineModel,
    network: Network,
    options: EngineOptions,
    slo: Slo | None = None,
) -> Latencies:
    """`slo`: what the router is told, with the prices of the machine's work; None: neither. Raises RuntimeError where
    the simulator served less than the pool did."""
    ordered = sorted(answers, key=lambda answer: answer.sent_seconds)
    requests = tuple(
        Request(number, answer.sent_seconds, answer.prompt_tokens, len(answer.token_seconds))
        for number, answer in enumerate(ordered)
    )
    trace = Trace("as sent", requests, requests[-1].arrival_seconds)
    mean_output = float(np.mean([request.output_tokens for request in requests]))
    setting = Setting(
        slo=slo or _NO_SLO,
        machines=[model] * len(roles),
        network_bytes_per_second=network.bytes_per_second,
        expected_prompt_tokens=float(np.mean([request.prompt_tokens for request in requests])),
        expected_output_tokens=mean_output,
        expected_requests_per_second=len(requests) / max(1.0, trace.horizon_seconds),
    )
    # A router expects the mean of the answers it saw, and no more than the request allows: here, its whole length.
    conditions = Conditions(network=network, expect_output=lambda request: min(mean_output, request.output_tokens))
    outcome = simulate(_policy(roles, options, priced=slo is not None), trace, setting, conditions)
    lost = [request.number for request in outcome.requests if request.finished_seconds is None]
    if lost:
        raise RuntimeError(f"the simulator did not finish requests {lost}: {outcome.notes}")
    gaps = [gap_arrays(request.gaps) for request in outcome.requests]
    return Latencies(
        tuple(request.ttft_seconds or 0.0 for request in outcome.requests),
        tuple(float(gap) for seconds, counts in gaps for gap in np.repeat(seconds, counts)),
    )


def _policy(roles: Sequence[Role], options: EngineOptions, priced: bool) -> Policy:
    """The router as its process runs it, roles held still: nobody is refused, and no prefix is looked for."""
    router = Options(
        step_tokens=options.step_tokens,
        max_sequences=options.most_streams,
        admission=False,
        moves=False,
        priced=priced,
        live=False,
        affinity=False,
        slack_budget=False,
        relegate=False,
    )
    return replace(ours(router), first_roles=lambda _: roles)
