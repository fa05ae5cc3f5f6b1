"""DistServe's figures (OSDI 2024): goodput and tightness against one pool, placements, and what its transfers take.

On its own step times and KV capacities. Its data sets are not in this repository: chatbot requests have the lengths of
Azure's conversations, summaries those of arXiv, both without requests of more than the 2,048 tokens that OPT reads.
Arrivals are Poisson, and a request attains its SLO by its TTFT and its mean TPOT, as there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np
from bench.published.figure import FAR, Figure, exactly
from bench.published.machines import nvlink_bytes_per_second, opt
from bench.published.policies import OLD_VLLM, SPLIT_FUSE, one_pool

from poolwright.sim import traces
from poolwright.sim.baselines.distserve import Parallelism, distserve
from poolwright.sim.measures import goodput, percentile, tpot
from poolwright.sim.outcome import RequestOutcome
from poolwright.sim.policy import Policy, Setting, Slo
from poolwright.sim.request import Request, Trace
from poolwright.sim.simulation import Conditions, simulate
from poolwright.sim.step_time import Chunk, MachineModel
from poolwright_protocol.roles import Role

PAPER = "DistServe"
CONTEXT_TOKENS = 2048  # of OPT
ATTAINMENT = 0.9
MOST_RATE = 24.0
LENGTHS_WHY = "other lengths than the paper's data set"


@dataclass(frozen=True, slots=True)
class Task:
    """`slo`: TTFT and TPOT of table 1."""

    name: str
    model: str
    slo: Slo
    lengths: str
    prompt: Parallelism
    token: Parallelism
    pool: Parallelism  # of one instance of a pool for both phases, with at most as many GPUs


CHATBOT_13B = Task(
    "chatbot, OPT-13B",
    "opt-13b",
    Slo(0.25, 0.1),
    "conversation",
    Parallelism(2, 1),
    Parallelism(1, 1),
    Parallelism(1, 1),
)
CHATBOT_66B = Task(
    "chatbot, OPT-66B",
    "opt-66b",
    Slo(2.5, 0.15),
    "conversation",
    Parallelism(4, 1),
    Parallelism(2, 2),
    Parallelism(4, 1),
)
SUMMARIES = Task(
    "summaries, OPT-66B", "opt-66b", Slo(15.0, 0.15), "arxiv", Parallelism(4, 1), Parallelism(2, 2), Parallelism(4, 1)
)


@cache
def lengths(name: str) -> Sequence[tuple[int, int]]:
    drawn = (
        traces.arxiv_lengths()
        if name == "arxiv"
        else [(r.prompt_tokens, r.output_tokens) for r in traces.azure_conversation()]
    )
    return [(prompt, output) for prompt, output in drawn if prompt + output <= CONTEXT_TOKENS]


def poisson(task: Task, rate: float, seconds: float, seed: int = 0) -> Trace:
    """At least so long that some thirty requests come."""
    return traces.generated(lengths(task.lengths), rate, max(seconds, 30 / rate), seed, task.name)


def figures(seconds: float = 90.0) -> list[Figure]:
    return [*comparisons(seconds), *placements(seconds), *transfers(seconds)]


# Runs of a whole system.


@dataclass(frozen=True, slots=True)
class System:
    name: str
    policy: Callable[[], Policy]
    machines: Sequence[MachineModel]

    @property
    def gpus(self) -> int:
        return sum(model.gpus for model in self.machines)


def systems(task: Task) -> Mapping[str, System]:
    def model(parallelism: Parallelism) -> MachineModel:
        return opt(task.model, parallelism.tensor, parallelism.pipeline)

    def pool(name: str, policy: Callable[[], Policy]) -> System:
        instances = (task.prompt.gpus + task.token.gpus) // task.pool.gpus
        return System(name, policy, [model(task.pool)] * instances)

    split = System("DistServe", lambda: distserve(prompt=1), [model(task.prompt), model(task.token)])
    return {
        "DistServe": split,
        "vLLM": pool("vLLM", lambda: one_pool("vLLM", OLD_VLLM)),
        "DeepSpeed-MII": pool("DeepSpeed-MII", lambda: one_pool("DeepSpeed-MII", SPLIT_FUSE)),
    }


def roomy(system: System) -> System:
    """The same, whose token machine never lacks KV memory."""
    prompt, token = system.machines
    return replace(system, machines=[prompt, token._replace(kv_capacity_tokens=ROOM * token.kv_capacity_tokens)])


def run(system: System, trace: Trace, slo: Slo) -> Sequence[RequestOutcome]:
    means = traces.means(trace)
    setting = Setting(
        slo,
        system.machines,
        nvlink_bytes_per_second(),
        means.prompt_tokens,
        means.output_tokens,
        means.requests_per_second,
    )
    return simulate(system.policy(), trace, setting, Conditions(drain_seconds=120.0)).requests


def stretch(request: RequestOutcome, slo: Slo) -> float:
    """By how much the SLO would have to be wider for this request; at most 1 where it is kept."""
    if request.ttft_seconds is None or request.finished_seconds is None:
        return float("inf")
    return max(request.ttft_seconds / slo.ttft_seconds, (tpot(request) or 0.0) / slo.tbt_seconds)


def least_scale(requests: Sequence[RequestOutcome], slo: Slo) -> float:
    """The narrowest multiple of the SLO that the wanted share attains."""
    value = percentile(np.array([stretch(request, slo) for request in requests]), 100 * ATTAINMENT)
    return float("inf") if value is None else value


def goodput_per_gpu(system: System, task: Task, seconds: float) -> float:
    def attained_at(rate: float) -> float:
        return float(least_scale(run(system, poisson(task, rate, seconds), task.slo), task.slo) <= 1)

    return goodput(attained_at, 1.0, 0.05, MOST_RATE, tolerance=0.06).factor / system.gpus


PUBLISHED: Mapping[tuple[str, str], tuple[tuple[float, float], tuple[float, float] | None, str]] = {
    (CHATBOT_13B.name, "vLLM"): ((2.0, 4.6), (1.8, 3.2), "section 6.2, all chatbots"),
    (CHATBOT_13B.name, "DeepSpeed-MII"): ((1.6, 7.4), None, "section 6.2, all chatbots"),
    (CHATBOT_66B.name, "vLLM"): ((2.0, 4.6), (1.8, 3.2), "section 6.2, all chatbots"),
    (CHATBOT_66B.name, "DeepSpeed-MII"): ((1.6, 7.4), None, "section 6.2, all chatbots"),
    (SUMMARIES.name, "vLLM"): (exactly(4.3), exactly(12.6), "section 6.2"),
    (SUMMARIES.name, "DeepSpeed-MII"): (exactly(1.8), exactly(2.6), "section 6.2"),
}
ROOM = 20  # times the KV memory of the token machine, to see what it is the cause of


def comparisons(seconds: float) -> list[Figure]:
    found = []
    for task in (CHATBOT_13B, CHATBOT_66B, SUMMARIES):
        those = systems(task)
        rates = {name: goodput_per_gpu(system, task, seconds) for name, system in those.items()}
        with_room = goodput_per_gpu(roomy(those["DistServe"]), task, seconds)
        why = (
            f"the one token machine's KV memory fills, and prompts wait behind it: with {ROOM} times as much the split "
            f"makes {with_room:.2f} requests/s a GPU; the rest is unexplained"
            if with_room > (1 + FAR) * rates["DistServe"]
            else ""
        )
        for other in ("vLLM", "DeepSpeed-MII"):
            rate, tighter, section = PUBLISHED[task.name, other]
            source, ours = f"{PAPER}, {section}", rates["DistServe"]
            by = ", ".join(dict.fromkeys(model.name for model in those["DistServe"].machines))
            found.append(
                Figure(
                    f"{task.name}: rate that keeps the SLO, over {other}",
                    source,
                    rate,
                    ours / rates[other] if rates[other] > 0 else None,
                    by,
                    "×",
                    why=why if rates[other] > 0 else f"{other} keeps the SLO at no rate tried, from 0.05/s",
                    remark=f"{ours:.2f} over {rates[other]:.2f} requests/s a GPU; {LENGTHS_WHY}",
                )
            )
            if tighter is None or rates[other] <= 0:
                continue
            at = rates[other] * those[other].gpus
            scales = {
                name: least_scale(
                    run(those[name], poisson(task, at * those[name].gpus / those[other].gpus, seconds), task.slo),
                    task.slo,
                )
                for name in ("DistServe", other)
            }
            found.append(
                Figure(
                    f"{task.name}: SLO tighter than {other}'s",
                    source,
                    tighter,
                    scales[other] / scales["DistServe"],
                    by,
                    "×",
                    why=why,
                    remark=f"at {rates[other]:.2f} requests/s a GPU, where {other} just keeps it (the paper's rate is "
                    f"not in the sources at hand); {LENGTHS_WHY}",
                )
            )
    found.append(
        Figure(
            "chatbot, OPT-175B",
            f"{PAPER}, section 6.2",
            None,
            None,
            "",
            why="no step times of OPT-175B: DistServe publishes fits of OPT-13B and OPT-66B",
        )
    )
    return found


# Placements: the parallelism that each phase alone wants.


@dataclass(frozen=True, slots=True)
class _Instant:
    """Prompts that cost nothing, so that answers alone are measured."""

    name: str = "instant"

    def seconds(self, chunks: Sequence[Chunk], decodes: int, context_tokens: float) -> float:
        return 1e-6

    def decode_run(self, decodes: int, context_tokens: float, seconds: float, most_steps: int) -> tuple[int, float]:
        return most_steps, most_steps * 1e-6


CANDIDATES: Mapping[str, Sequence[Parallelism]] = {
    "opt-13b": [Parallelism(t, p) for t, p in ((1, 1), (2, 1), (4, 1), (1, 2))],
    "opt-66b": [Parallelism(t, p) for t, p in ((2, 2), (2, 4), (4, 1), (8, 1))],
}


def phase_goodput(task: Task, parallelism: Parallelism, phase: str, seconds: float) -> float:
    """Requests a second and GPU that keep this phase's own target, by simulation of the phase alone."""
    model = opt(task.model, parallelism.tensor, parallelism.pipeline)
    free = MachineModel("instant", _Instant(), 1 << 30, 1)
    slo = task.slo

    def attained_at(rate: float) -> float:
        trace = poisson(task, rate, seconds)
        if phase == "prompt":
            alone = [Request(r.number, r.arrival_seconds, r.prompt_tokens, 1) for r in trace]
            trace = traces.made(trace.name, alone, trace.horizon_seconds)
            models = [model]
            policy = one_pool("prompts", distserve(prompt=1).rules(_setting(task, models, 1.0))[Role.PROMPT])
        else:
            models = [free, model]
            policy = distserve(prompt=1)
        setting = _setting(task, models, traces.means(trace).requests_per_second)
        outcome = simulate(policy, trace, setting, Conditions(drain_seconds=120.0)).requests
        kept = sum(_keeps(request, slo, phase) for request in outcome)
        return kept / max(1, len(outcome))

    return goodput(attained_at, ATTAINMENT, 0.05, MOST_RATE, tolerance=0.06).factor / parallelism.gpus


def _keeps(request: RequestOutcome, slo: Slo, phase: str) -> bool:
    if request.ttft_seconds is None or request.finished_seconds is None:
        return False
    if phase == "prompt":
        return request.ttft_seconds <= slo.ttft_seconds
    # What an answer waits for its first step is its own phase's.
    return (tpot(request) or 0.0) <= slo.tbt_seconds


def _setting(task: Task, models: Sequence[MachineModel], rate: float) -> Setting:
    drawn = lengths(task.lengths)
    prompt, output = fmean(p for p, _ in drawn), fmean(o for _, o in drawn)
    return Setting(task.slo, models, 1e15, prompt, output, rate)


def best(task: Task, phase: str, seconds: float) -> list[tuple[float, Parallelism]]:
    """Of those measured, the best for each GPU first."""
    found = [(phase_goodput(task, p, phase, seconds), p) for p in CANDIDATES[task.model]]
    return sorted(found, key=lambda pair: -pair[0])


def placements(seconds: float) -> list[Figure]:
    found = []
    for task, wanted in ((CHATBOT_13B, "table 3"), (CHATBOT_66B, "table 3")):
        for phase, published in (("prompt", task.prompt), ("token", task.token)):
            ranked = best(task, phase, seconds)
            ours = ranked[0][1]
            said = ", ".join(f"{_named(p)} {rate:.2f}" for rate, p in ranked[:4])
            rate = {p: r for r, p in ranked}[published]
            found.append(
                Figure(
                    f"{task.name}: parallelism of the {phase} phase",
                    f"{PAPER}, {wanted}",
                    None,
                    None,
                    f"distserve-a100-{task.model}",
                    claim=_named(published),
                    holds=ours == published,
                    why=f"here {_named(ours)}; the paper's attains {rate / ranked[0][0]:.0%} of it",
                    remark=f"requests/s a GPU: {said}; {LENGTHS_WHY}; degrees without a fit are not tried",
                )
            )
    found.append(
        Figure(
            "OPT-175B: TP3 PP3 for prompts, TP4 PP3 for answers",
            f"{PAPER}, table 3",
            None,
            None,
            "",
            why="no step times of OPT-175B",
        )
    )
    return found


def _named(parallelism: Parallelism) -> str:
    return f"TP{parallelism.tensor} PP{parallelism.pipeline}"


# Transfers.


def transfers(seconds: float) -> list[Figure]:
    """KV over NVLink at what Vidur measured for it, over what a request takes from arrival to its last token."""
    rate = nvlink_bytes_per_second()
    found = []
    for task in (CHATBOT_13B, CHATBOT_66B):
        system = systems(task)["DistServe"]
        half = 0.5 * goodput_per_gpu(system, task, seconds) * system.gpus
        outcome = [r for r in run(system, poisson(task, half, seconds), task.slo) if r.finished_seconds is not None]
        per_token = system.machines[0].kv_bytes_per_token
        sent = np.array([r.prompt_tokens * per_token / rate for r in outcome])
        whole = np.array([(r.finished_seconds or 0.0) - r.arrival_seconds for r in outcome])
        tail = percentile(sent, 95)
        by = f"{system.machines[0].name}; vidur_send_recv, {rate / 1e9:.0f} GB/s"
        share = float(sent.sum() / whole.sum())
        remark = f"{LENGTHS_WHY}; at half the goodput"
        found += [
            Figure(
                f"{task.name}: transfers in all of a request's time",
                f"{PAPER}, section 6.3: under 0.1 %, OPT-175B",
                (0.0, 0.1),
                share * 100,
                by,
                " %",
                3,
                why="another model: the paper's share is OPT-175B's, whose steps are longer",
                remark=remark,
            ),
            Figure(
                f"{task.name}: 95th percentile of a transfer",
                f"{PAPER}, figure 10: 95 % under 30 ms",
                (0.0, 30.0),
                None if tail is None else tail * 1e3,
                by,
                " ms",
                1,
                remark=remark,
                why="no request ended",
            ),
        ]
    return found
