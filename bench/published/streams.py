"""The worked example of a lecture on batching: 32 streams decode Llama 70B on eight GPUs, and a long prompt comes.

The lecture (in Chinese, without publisher): «高并发批处理演进：从 Continuous Batching 到 Chunked Prefill 消除排头阻塞».
It says "eight A100 or H100" and no contexts; here streams stand at 1,024 tokens, and each of its numbers is asked of
four tables. Its numbers are illustrations, not measurements.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.published.figure import Figure
from bench.published.one_machine import by_rules, serve
from bench.published.sarathi import chunked_seconds

from poolwright.sim.measures import gap_arrays
from poolwright.sim.policy import EngineRules
from poolwright.sim.profiles import machine
from poolwright.sim.request import Request
from poolwright.sim.step_time import Chunk, MachineModel
from poolwright_engine.scheduling.scheduler_config import Batching

LECTURE = "lecture on batching"
MACHINES = (
    "a100-llama-70b-tp8",
    "h100-llama-70b-tp8",
    "splitwise-a100-llama2-70b-tp8",
    "splitwise-h100-llama2-70b-tp8",
)
STREAMS, CONTEXT_TOKENS, LONG_TOKENS = 32, 1024, 16384
PROMPT_TOKENS, CHUNK_TOKENS, BESIDE = 4096, 512, 64
STREAM_TOKENS = 3000
ARRIVAL_SECONDS = 15.0  # when all streams decode

# Why a table is off, where it is: shown only then.
KERNELS = "kernels of 2026, without the CPU's time between them"
OLD = "measured with software of 2023"
PARAMETERS, GPUS = 70e9, 8
PEAK_FLOPS = {"a100": 312e12, "h100": 989e12}  # of a GPU in bf16, dense: NVIDIA's data sheets


def figures() -> list[Figure]:
    return [figure for name in MACHINES for figure in _of(machine(name))]


def _of(model: MachineModel) -> list[Figure]:
    time = model.step_time
    context = float(CONTEXT_TOKENS)
    decodes, more = time.seconds((), STREAMS, STREAMS * context), time.seconds((), BESIDE, BESIDE * context)
    whole = time.seconds((Chunk(0, LONG_TOKENS),), 0, 0.0)
    both = time.seconds((Chunk(0, LONG_TOKENS),), STREAMS, STREAMS * context)
    chunk = time.seconds((Chunk(0, CHUNK_TOKENS),), BESIDE, BESIDE * context)
    stalls = stall(model)
    cut = 1 - stalls["chunks"].largest / stalls["whole"].largest
    old = model.name.startswith("splitwise")
    cause = OLD if old else KERNELS
    far = "; its longest prompt measured is 8,192 tokens, and beyond it the last piece goes on" if old else ""

    def work(tokens: int) -> str:
        peak = next(flops for gpu, flops in PEAK_FLOPS.items() if gpu in model.name)
        least = 2 * PARAMETERS * tokens / (GPUS * peak)
        return f"{cause}; products of {tokens:,} tokens take {least * 1e3:.0f} ms at the peak of the data sheet"

    def row(
        what: str, section: str, low: float, high: float, seconds: float, why: str = cause, remark: str = ""
    ) -> Figure:
        return Figure(what, f"{LECTURE}, {section}", (low, high), seconds * 1e3, model.name, " ms", 0, why, remark)

    return [
        row("a step of 32 decodes", "3.1", 15, 35, decodes),
        row("a prompt of 16,384 tokens whole", "3.1", 800, 2500, whole, work(LONG_TOKENS) + far),
        row("the same beside 32 decodes", "3.2", 1500, 1500, both, work(LONG_TOKENS) + far),
        row(
            "a prompt of 4,096 tokens whole",
            "4.1",
            350,
            350,
            chunked_seconds(model, PROMPT_TOKENS, PROMPT_TOKENS),
            work(PROMPT_TOKENS),
        ),
        row(
            "the same in eight chunks of 512, beside 32 decodes",
            "6.2",
            380,
            420,
            beside_seconds(model),
            work(PROMPT_TOKENS + 8 * STREAMS),
            f"{chunked_seconds(model, PROMPT_TOKENS, CHUNK_TOKENS) * 1e3:.0f} ms without decodes",
        ),
        row("a step of 64 decodes", "4.2", 35, 35, more),
        row("the same with a chunk of 512", "4.2", 40, 40, chunk, _ride(model, chunk, more)),
        row("a step of 8,192 tokens", "6.1", 150, 300, time.seconds((Chunk(0, 8192),), 0, 0.0), work(8192)),
        row(
            "a step of 2,048 tokens, 32 of them decodes",
            "6.1: about 40 ms with 2,048 to 4,096",
            40,
            40,
            time.seconds((Chunk(0, 2048 - STREAMS),), STREAMS, STREAMS * context),
            work(2048),
        ),
        Figure(
            "the longest gap that chunks cut, budget 512",
            f"{LECTURE}, 4.2: peaks cut by 80–95 %",
            (80, 95),
            cut * 100,
            model.name,
            " %",
            0,
            remark=f"simulated: {stalls['whole'].largest * 1e3:.0f} ms to {stalls['chunks'].largest * 1e3:.0f} ms, "
            f"usually {stalls['chunks'].usual * 1e3:.0f} ms",
        ),
    ]


def _ride(model: MachineModel, chunk: float, decodes: float) -> str:
    alone = model.step_time.seconds((Chunk(0, CHUNK_TOKENS),), 0, 0.0)
    return (
        f"a chunk of 512 alone takes {alone * 1e3:.0f} ms there, so no step with it can take 40"
        if (alone > 0.040)
        else f"64 decodes alone take {decodes * 1e3:.0f} ms there, the chunk adds {(chunk - decodes) * 1e3:.0f}"
    )


def beside_seconds(model: MachineModel) -> float:
    context = float(STREAMS * CONTEXT_TOKENS)
    starts = range(0, PROMPT_TOKENS, CHUNK_TOKENS)
    return sum(
        model.step_time.seconds((Chunk(at, CHUNK_TOKENS),), STREAMS, context + STREAMS * number)
        for number, at in enumerate(starts)
    )


@dataclass(frozen=True, slots=True)
class Stall:
    """Gaps of the 32 streams, in seconds."""

    usual: float
    largest: float
    ttft_of_long: float


def stall(model: MachineModel) -> Mapping[str, Stall]:
    """The prompt whole beside the decodes, and in chunks under a budget of 512 tokens."""
    streams = [Request(n, 0.0, CONTEXT_TOKENS, STREAM_TOKENS) for n in range(STREAMS)]
    requests = [*streams, Request(STREAMS, ARRIVAL_SECONDS, LONG_TOKENS, 2)]
    found = {}
    for form, rules in (
        ("whole", EngineRules(Batching.ORCA, token_budget=LONG_TOKENS)),
        ("chunks", EngineRules(Batching.SARATHI, token_budget=CHUNK_TOKENS)),
    ):
        served = serve(model, by_rules(rules), requests)
        seconds: list[float] = []
        usual: list[float] = []
        for one in served[:STREAMS]:
            at = one.request.arrival_seconds + one.ttft_seconds
            for gap, count in zip(*(column.tolist() for column in gap_arrays(one.gaps)), strict=True):
                at += gap * count
                (seconds if at >= ARRIVAL_SECONDS else usual).append(gap)
        found[form] = Stall(usual[-1], max(seconds), served[-1].ttft_seconds)
    return found
