"""Splitwise's figures (ISCA 2024): what a newer GPU is worth to each phase, how many machines 70 requests a second
need, and how much more the same power or money serves once it is split.

On the measurements of splitwise-sim, read as `poolwright.sim.profiles.splitwise_machines` says: so not with the decode
times, nearly flat in the batch, of that simulator, by which the paper's pools were sized. Throughput is the paper's:
the highest rate that keeps all nine slow-downs of its table VI against a DGX-A100; arrivals are Poisson, lengths those
of the two Azure traces, the network 200 GB/s a machine as in its simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from bench.published.figure import Figure, exactly
from bench.published.policies import MIXED_BATCHING, one_pool

from poolwright.sim import traces
from poolwright.sim.baselines.profile import MachineProfile
from poolwright.sim.baselines.routers import ShortestQueue
from poolwright.sim.baselines.splitwise import splitwise
from poolwright.sim.measures import SLOW_DOWN_LIMITS, goodput, slow_downs
from poolwright.sim.policy import Policy, Setting, Slo
from poolwright.sim.profiles import machine
from poolwright.sim.request import Trace
from poolwright.sim.simulation import Conditions, simulate
from poolwright.sim.step_time import Chunk, MachineModel

PAPER = "Splitwise"
NETWORK_BYTES_PER_SECOND = 200e9
MODELS = {"Llama-2 70B": "llama2-70b-tp8", "BLOOM-176B": "bloom-176b-tp8"}
TRACES = {"code": traces.azure_code, "conversation": traces.azure_conversation}
PROMPT_TOKENS, DECODES, CONTEXT_TOKENS = 2048, 32, 1024


def figures(seconds: float = 30.0) -> list[Figure]:
    return [*hardware(), *provisioning(seconds), *designs(seconds)]


def of(gpu: str, model: str) -> MachineModel:
    return machine(f"splitwise-{gpu}-{MODELS[model]}")


# Table I.


def hardware() -> list[Figure]:
    old, new = of("a100", "Llama-2 70B"), of("h100", "Llama-2 70B")
    peak = "a ratio of data sheets; here of steps that were measured, which reach less of the newer GPU's peak"
    found = [
        _worth("power of the GPUs", 1.75, new.watts, old.watts),
        _worth("cost of a machine", 38 / 17.6, new.dollars_per_hour, old.dollars_per_hour),
    ]
    for kind, name in (
        ("splitwise-sim", "splitwise-{}-llama2-70b-tp8"),
        ("aiconfigurator", "{}-llama-70b-tp8"),
    ):
        slow, quick = (machine(name.format(gpu)).step_time for gpu in ("a100", "h100"))
        prompt = [time.seconds((Chunk(0, PROMPT_TOKENS),), 0, 0.0) for time in (slow, quick)]
        decodes = [time.seconds((), DECODES, float(DECODES * CONTEXT_TOKENS)) for time in (slow, quick)]
        by = f"{kind}, Llama 70B, TP8"
        found += [
            Figure(
                f"H100 over A100: TFLOPs; ours: a prompt of {PROMPT_TOKENS:,} tokens",
                f"{PAPER}, table I",
                exactly(3.43),
                prompt[0] / prompt[1],
                by,
                "×",
                why=peak,
            ),
            Figure(
                f"H100 over A100: memory bandwidth; ours: {DECODES} decodes at {CONTEXT_TOKENS:,} tokens",
                f"{PAPER}, table I",
                exactly(1.64),
                decodes[0] / decodes[1],
                by,
                "×",
                why=peak,
            ),
        ]
    found.append(
        Figure(
            "H100 over A100: memory",
            f"{PAPER}, table I",
            exactly(1.0),
            new.kv_capacity_tokens / old.kv_capacity_tokens,
            "room for KV, Llama 70B, TP8",
            "×",
        )
    )
    return found


def _worth(what: str, published: float, new: float | None, old: float | None) -> Figure:
    ratio = None if new is None or old is None else new / old
    return Figure(
        f"H100 over A100: {what}", f"{PAPER}, table I", exactly(published), ratio, "prices of the planner", "×",
        why="not in the planner's table", remark="taken from that table",
    )  # fmt: skip


# Clusters.


@cache
def lengths(trace: str) -> Sequence[tuple[int, int]]:
    return [(r.prompt_tokens, r.output_tokens) for r in TRACES[trace]()]


def poisson(trace: str, rate: float, seconds: float) -> Trace:
    return traces.generated(lengths(trace), rate, seconds, seed=0, name=trace)


@dataclass(frozen=True, slots=True)
class Design:
    """`prompt` 0: all machines do both, whole prompts beside decodes."""

    name: str
    gpu: str
    machines: int
    prompt: int = 0

    def policy(self) -> Policy:
        if self.prompt:
            return splitwise(self.prompt)
        return one_pool(self.name, MIXED_BATCHING, ShortestQueue)


def stress(design: Design, model: str, trace: Trace) -> float:
    """The worst of the nine slow-downs over its limit: at most 1 where all are kept."""
    kind, reference = of(design.gpu, model), of("a100", model)
    means = traces.means(trace)
    step = reference.step_time.seconds((), 1, means.prompt_tokens)
    setting = Setting(
        Slo(1.0, 1.5 * step),  # of no engine here: those of prompts take whole ones, those of answers have none
        [kind] * design.machines,
        NETWORK_BYTES_PER_SECOND,
        means.prompt_tokens,
        means.output_tokens,
        means.requests_per_second,
    )
    outcome = simulate(design.policy(), trace, setting, Conditions(drain_seconds=60.0))
    return slow_downs(outcome.requests, reference).stress


# Section 4.4: coding at 70 requests a second.
RATE, PUBLISHED_PROMPT, PUBLISHED_TOKEN = 70.0, 27, 3
TOKEN_MACHINES = {"BLOOM-176B": (5, 6), "Llama-2 70B": (2, 3)}


def provisioning(seconds: float) -> list[Figure]:
    found = []
    for model in MODELS:
        trace = poisson("code", RATE, seconds)
        fits = [(p + t, t, p) for t in TOKEN_MACHINES[model] if (p := least_prompt(model, t, trace)) is not None]
        own = stress(Design("as published", "h100", PUBLISHED_PROMPT + PUBLISHED_TOKEN, PUBLISHED_PROMPT), model, trace)
        source = f"{PAPER}, section 4.4: HH, coding, 70 requests/s: {PUBLISHED_PROMPT}P + {PUBLISHED_TOKEN}T"
        by = of("h100", model).name
        split = f"{min(fits)[2]}P + {min(fits)[1]}T" if fits else "none of the splits tried"
        found.append(
            Figure(
                f"machines that coding at 70 requests/s needs, {model}",
                source,
                exactly(PUBLISHED_PROMPT + PUBLISHED_TOKEN),
                float(min(fits)[0]) if fits else None,
                by,
                digits=0,
                why=("" if fits else f"no split up to {MOST_PROMPT} prompt machines keeps all nine slow-downs"),
                remark=f"{split}; 27P + 3T is at {own:.2f} of the limits; which model the paper's example is of is not "
                f"in the sources at hand; {seconds:g} s; tried with {', '.join(map(str, TOKEN_MACHINES[model]))} token "
                "machines",
            )
        )
    return found


LEAST_PROMPT, MOST_PROMPT = 6, 40


def least_prompt(model: str, token: int, trace: Trace) -> int | None:
    """By bisection: more prompt machines never keep less, but for chance."""

    def kept(prompt: int) -> bool:
        return stress(Design("tried", "h100", prompt + token, prompt), model, trace) <= 1

    low, high = LEAST_PROMPT, MOST_PROMPT
    if not kept(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if kept(middle):
            high = middle
        else:
            low = middle + 1
    return low


# Section 6: a fifth of the clusters that take as much power as 40 DGX-H100.
DESIGNS = (
    Design("Baseline-A100", "a100", 14),
    Design("Baseline-H100", "h100", 8),
    Design("Splitwise-AA", "a100", 14, prompt=9),
    Design("Splitwise-HH", "h100", 8, prompt=5),
)
COMPARED = (
    (
        "throughput of Splitwise-AA over Baseline-A100, same machines",
        "section 6.2",
        2.15,
        ("Splitwise-AA",),
        "Baseline-A100",
    ),
    (
        "throughput, same power and cost: the better split over Baseline-A100",
        "abstract",
        2.35,
        ("Splitwise-AA", "Splitwise-HH"),
        "Baseline-A100",
    ),
    (
        "throughput at 20 % less cost: Splitwise-AA over Baseline-H100, same power",
        "abstract",
        1.4,
        ("Splitwise-AA",),
        "Baseline-H100",
    ),
)
LOW_RATE, HIGH_RATE = 1.0, 41.0


def throughput(design: Design, model: str, seconds: float, trace: str = "conversation") -> float:
    def kept(rate: float) -> float:
        return float(stress(design, model, poisson(trace, rate, seconds)) <= 1)

    return goodput(kept, 1.0, LOW_RATE, HIGH_RATE, tolerance=0.08).factor


def designs(seconds: float) -> list[Figure]:
    found = []
    for model in MODELS:
        rates = {design.name: throughput(design, model, seconds) for design in DESIGNS}
        said = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
        remark = f"conversation, {said} requests/s; a fifth of the paper's clusters, {seconds:g} s"
        by = f"splitwise-sim, {model}"
        for what, section, published, above, below in COMPARED:
            top = max(rates[name] for name in above)
            found.append(
                Figure(
                    f"{what}, {model}",
                    f"{PAPER}, {section}",
                    exactly(published),
                    top / rates[below] if rates[below] > 0 else None,
                    by,
                    "×",
                    why=_crowded(model)
                    if rates[below] > 0
                    else f"{below} keeps all nine slow-downs at no rate tried, from {LOW_RATE}/s",
                    remark=remark,
                )
            )
    old, new = DESIGNS[2], DESIGNS[1]
    dollars = [(of(d.gpu, "Llama-2 70B").dollars_per_hour or 0.0) * d.machines for d in (old, new)]
    watts = [(of(d.gpu, "Llama-2 70B").watts or 0.0) * d.machines for d in (old, new)]
    found.append(
        Figure(
            "cost of Splitwise-AA below Baseline-H100's",
            f"{PAPER}, abstract: 20 %",
            exactly(20),
            100 * (1 - dollars[0] / dollars[1]),
            "prices of the planner",
            " %",
            0,
            remark=f"at {watts[0] / 1e3:.1f} and {watts[1] / 1e3:.1f} kW of GPUs",
        )
    )
    return found


def _crowded(model: str) -> str:
    kind, trace = of("a100", model), poisson("conversation", 10.0, 60.0)
    means = traces.means(trace)
    context = means.prompt_tokens + means.output_tokens / 2
    limit = SLOW_DOWN_LIMITS["tbt"][0] * kind.step_time.seconds((), 1, context)
    most = MachineProfile(kind).most_decodes(limit, context)
    pool = DESIGNS[2].machines - DESIGNS[2].prompt
    return (
        f"a median TBT of {SLOW_DOWN_LIMITS['tbt'][0]:g} times that of a lone request lets {most} mean decodes on an "
        f"A100 machine, {most * pool} on the {pool} of AA's token pool; the paper's simulator, whose decode times "
        "hardly grow with the batch, let it have many more"
    )
