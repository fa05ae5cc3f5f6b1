"""What the batching strategies do to latency, measured on this engine: four tables, as Markdown and JSON.

    python bench/engine_tables.py [--out build/bench/engine_tables.json] [--plots docs/figures] [--quick]

- stall: eight streams decode when a long prompt arrives. The largest gap between two tokens of a stream over the usual
  gap, under each strategy and, where prompts are cut, over token budgets (Sarathi-Serve, OSDI 2024, figures 1 and 9).
- ablation: hybrid batches only, chunks only, and both, on requests whose lengths are drawn like two data sets of that
  paper, scaled down (its table 4).
- chunks: what cutting a prompt costs: time against the whole prompt, and KV bytes read again, N-1 times for the first
  of N chunks, N-2 for the second (its section 4.3 and figure 14).
- static: the useful share of request-level batches, counted by the engine, beside Σ Lᵢ / (B · max Lᵢ).

The engine's own loop, scheduler and CPU runner on the small real model. Every row says its MFU: model FLOP per second
over the best that this machine's matrix products reach. All are ratios within one run, or beside their own baseline.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from poolwright.local.model import ensure_demo_model
from poolwright_engine.checkpoint.loader import load_model
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.loop.engine_loop import EngineLoop, Identity, LoopConfig
from poolwright_engine.loop.observer import Observer
from poolwright_engine.model.llama import LlamaModel
from poolwright_engine.scheduling.runner import Row, Step
from poolwright_engine.scheduling.scheduler import Batch, Scheduler
from poolwright_engine.scheduling.scheduler_config import Batching
from poolwright_engine.scheduling.sequence import Request, SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
STREAMS = 8


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal, by median and 90th percentile, of the data sets in Sarathi-Serve's table 2."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]


DATA_SETS = (
    Lengths("openchat", prompt=(1730, 5696), output=(415, 834)),
    Lengths("arxiv", prompt=(7059, 12985), output=(208, 371)),
)


class ChunksAlone:
    """Chunked prefill without hybrid batches: a chunk, then the decodes, in turn. For the ablation only."""

    def __init__(self) -> None:
        self._decodes_next = False

    def fill(self, scheduler: Scheduler, batch: Batch) -> None:
        if self._decodes_next:
            scheduler.decode_running(batch)
            self._decodes_next = False
        if batch.rows:
            return
        for prompt in (*scheduler.prompts_in_flight(), *scheduler.candidates(batch)):
            tokens = scheduler.piece(batch, prompt, batch.room_for_prefill)
            if tokens:
                scheduler.compute(batch, prompt, tokens)
        self._decodes_next = bool(batch.rows)
        if not batch.rows:
            scheduler.decode_running(batch)


class Counts(Observer):
    """What the steps of one experiment came to."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.num_tokens = 0
        self.num_padded = 0

    def step(self, num_tokens: int, num_prefill_tokens: int, busy_seconds: float) -> None:
        self.num_tokens += num_tokens
        self.busy_seconds += busy_seconds

    def padded(self, num_tokens: int) -> None:
        self.num_padded += num_tokens


@dataclass(slots=True)
class Stream:
    """One request and when each of its tokens came."""

    prompt: int
    output: int
    arrival_seconds: float = 0.0
    token_seconds: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.token_seconds[0] - self.arrival_seconds

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_seconds, self.token_seconds[1:], strict=False)]


class Lab:
    """One model, and an engine for each experiment."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.threads = threads
        self.loaded = load_model(ensure_demo_model(), "float32")
        self.shape = self.loaded.config.compute_shape()
        self.bytes_per_token = self.loaded.config.kv_shape(torch.float32).bytes_per_token
        first = self._runner()
        first.choose_forms("auto")
        first.close()
        self.peak_flops = _peak_flops()

    def _runner(self) -> CpuRunner:
        model: LlamaModel = self.loaded.model
        return CpuRunner(model, 1 + 20 * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, 64, cpu_threads=self.threads)

    @asynccontextmanager
    async def engine(
        self,
        batching: Batching,
        budget: int,
        counts: Counts,
        chunks_alone: bool = False,
        static_size: int | None = None,
    ) -> AsyncIterator[EngineLoop]:
        engine = EngineLoop(
            self._runner(),
            config=LoopConfig(
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=budget,
                max_num_seqs=min(64, budget),
                batching=batching,
                enable_prefix_caching=False,
                static_batch_size=static_size,
                static_window_seconds=0.5,
            ),
            identity=Identity(pod_uid="bench"),
            eos_token_ids=frozenset(),
            observer=counts,
        )
        if chunks_alone:
            engine.scheduler.strategy = ChunksAlone()
        await engine.start()
        try:
            yield engine
        finally:
            await engine.drain(60)
            await engine.close()

    def mfu(self, streams: Sequence[Stream], busy_seconds: float) -> float:
        flops = 0
        for stream in streams:
            computed = stream.prompt + max(0, len(stream.token_seconds) - 1)
            flops += self.shape.flops([(0, computed)], len(stream.token_seconds))
        return flops / busy_seconds / self.peak_flops if busy_seconds else 0.0


def _peak_flops() -> float:
    """Of the best of several large float32 products."""
    a, b = torch.randn(1024, 1536), torch.randn(1536, 1536)
    best = math.inf
    with torch.inference_mode():
        for _ in range(12):
            began = time.perf_counter()
            a @ b
            best = min(best, time.perf_counter() - began)
    return 2 * 1024 * 1536 * 1536 / best


async def run(engine: EngineLoop, stream: Stream, number: int, delay: float = 0.0) -> None:
    await asyncio.sleep(delay)
    rng = random.Random(number)
    stream.arrival_seconds = time.monotonic()
    request = Request(
        request_id=f"bench-{number}",
        prompt_ids=tuple(rng.randrange(100, 40_000) for _ in range(stream.prompt)),
        params=SamplingParams(max_tokens=stream.output, temperature=0.0, ignore_eos=True),
        arrival_seconds=stream.arrival_seconds,
    )
    async for output in engine.generate(request):
        stream.token_seconds.extend([time.monotonic()] * len(output.token_ids))


# The tables.


async def stall(lab: Lab, batching: Batching, budget: int, prompt: int, answer: int) -> dict[str, object]:
    """Eight streams decode; a quarter into their answers one prompt comes."""
    counts, warm = Counts(), answer // 4
    async with lab.engine(batching, budget, counts, static_size=STREAMS) as engine:
        streams = [Stream(32, answer) for _ in range(STREAMS)]
        tasks = [asyncio.create_task(run(engine, stream, i)) for i, stream in enumerate(streams)]
        while min(len(stream.token_seconds) for stream in streams) < warm:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        long = Stream(prompt, 2)
        came = time.monotonic()
        await run(engine, long, STREAMS)
        await asyncio.gather(*tasks)
    quiet = statistics.median(
        gap
        for stream in streams
        for gap, at in zip(stream.gaps, stream.token_seconds[1:], strict=True)
        if at < came and gap > 0
    )
    worst = max(
        gap for stream in streams for gap, at in zip(stream.gaps, stream.token_seconds[1:], strict=True) if at >= came
    )
    return {
        "batching": batching.value,
        "budget_tokens": budget,
        "prompt_tokens": prompt,
        "largest_gap_over_usual": worst / quiet,
        "usual_gap_ms": 1000 * quiet,
        "largest_gap_ms": 1000 * worst,
        "ttft_of_long_ms": 1000 * long.ttft,
        "mfu": lab.mfu([*streams, long], counts.busy_seconds),
    }


async def stalls(lab: Lab, quick: bool) -> list[dict[str, object]]:
    prompt = 256 if quick else 1024
    whole = [(b, MAX_MODEL_LEN) for b in (Batching.ORCA, Batching.PREFILL_FIRST, Batching.STATIC)]
    budgets = (64, 256) if quick else (32, 64, 128, 256, 512, 1024)
    cut = [(b, budget) for b in (Batching.SARATHI, Batching.VLLM) for budget in budgets]
    rows = []
    for batching, budget in (*whole, *cut):
        _say(f"stall: {batching} with a budget of {budget}")
        rows.append(await stall(lab, batching, budget, prompt, 24 if quick else 80))
    orca = _spike(rows[0])
    for row in rows:
        row["spike_cut_percent"] = 100 * (1 - _spike(row) / orca)
    return rows


def _spike(row: dict[str, object]) -> float:
    ratio = row["largest_gap_over_usual"]
    if not isinstance(ratio, float):
        raise TypeError("the ratio is a number")
    return ratio - 1


def drawn(lengths: Lengths, count: int, scale: int, seed: int) -> list[Stream]:
    rng = random.Random(seed)

    def draw(median: int, p90: int, least: int, most: int) -> int:
        sigma = math.log(p90 / median) / 1.2816
        return max(least, min(most, round(median / scale * math.exp(rng.gauss(0, sigma)))))

    return [Stream(draw(*lengths.prompt, 8, 1500), draw(*lengths.output, 4, 200)) for _ in range(count)]


async def ablation(lab: Lab, quick: bool) -> list[dict[str, object]]:
    """Poisson arrivals, the same for all three; the rate is such that the machine is busy but not drowned."""
    count, scale, budget = (8, 32, 64) if quick else (32, 16, 64)
    systems = (
        ("hybrid only", Batching.ORCA, MAX_MODEL_LEN, False),
        ("chunks only", Batching.SARATHI, budget, True),
        ("both", Batching.SARATHI, budget, False),
    )
    rows: list[dict[str, object]] = []
    for lengths in DATA_SETS:
        rate = await _rate(lab, lengths, scale)
        for name, batching, tokens, alone in systems:
            _say(f"ablation: {lengths.name}, {name}")
            rng = random.Random(7)
            at = 0.0
            counts = Counts()
            streams = drawn(lengths, count, scale, seed=11)
            async with lab.engine(batching, tokens, counts, chunks_alone=alone) as engine:
                tasks = []
                for number, stream in enumerate(streams):
                    tasks.append(asyncio.create_task(run(engine, stream, number, at)))
                    at += rng.expovariate(rate)
                await asyncio.gather(*tasks)
            gaps = sorted(gap for stream in streams for gap in stream.gaps)
            rows.append(
                {
                    "lengths": lengths.name,
                    "system": name,
                    "requests": count,
                    "ttft_p50_s": statistics.median(stream.ttft for stream in streams),
                    "tbt_p99_s": gaps[math.ceil(0.99 * len(gaps)) - 1],
                    "mfu": lab.mfu(streams, counts.busy_seconds),
                }
            )
    return rows


async def _rate(lab: Lab, lengths: Lengths, scale: int) -> float:
    """Requests per second at 70 % of what a closed loop of eight clients reaches."""
    streams = drawn(lengths, 8, scale, seed=3)
    began = time.monotonic()
    async with lab.engine(Batching.SARATHI, 256, Counts()) as engine:
        await asyncio.gather(*(run(engine, stream, i) for i, stream in enumerate(streams)))
    return 0.7 * len(streams) / (time.monotonic() - began)


def chunks(lab: Lab, quick: bool) -> list[dict[str, object]]:
    """One prompt alone, straight on the runner; the sizes take turns."""
    prompt = 512 if quick else 1536
    sizes = [size for size in (32, 64, 128, 256, 257, 512, 1024) if size < prompt] + [prompt]
    runner = lab._runner()
    rng = random.Random(5)
    ids = tuple(rng.randrange(100, 40_000) for _ in range(prompt))
    table = list(range(1, 2 + prompt // BLOCK_SIZE))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    best: dict[int, float] = {}
    try:
        for turn in range(2 if quick else 4):
            _say(f"chunks: turn {turn + 1}")
            for size in sizes:
                seconds = 0.0
                for start in range(0, prompt, size):
                    length = min(size, prompt - start)
                    row = Row(0, start, length, ids[start : start + length], table, start + length == prompt, params)
                    seconds += runner.submit(Step(0, (row,))).result().busy_seconds
                best[size] = min(seconds, best.get(size, math.inf))
    finally:
        runner.close()
    rows: list[dict[str, object]] = []
    flops = lab.shape.flops([(0, prompt)], 1)
    for size in sizes:
        count = -(-prompt // size)
        again = sum(min(size, prompt - i * size) * (count - 1 - i) for i in range(count))
        rows.append(
            {
                "prompt_tokens": prompt,
                "chunk_tokens": size,
                "chunks": count,
                "time_over_whole": best[size] / best[prompt],
                "kv_bytes_read_again": again * lab.bytes_per_token,
                "mfu": flops / best[size] / lab.peak_flops,
            }
        )
    return rows


async def static(lab: Lab, quick: bool) -> list[dict[str, object]]:
    """Batches of eight whose answers differ ever more in length."""
    rows: list[dict[str, object]] = []
    for spread in (1, 4, 16):
        _say(f"static: answers from {32 // spread} to 32 tokens")
        outputs = [max(2, round(32 / spread + (32 - 32 / spread) * (i / 7) ** 3)) for i in range(8)]
        streams = [Stream(16, output) for output in outputs]
        counts = Counts()
        async with lab.engine(Batching.STATIC, MAX_MODEL_LEN, counts, static_size=8) as engine:
            await asyncio.gather(*(run(engine, stream, i) for i, stream in enumerate(streams)))
        # The formula counts iterations of decoding: the prompts are of one length, and pad nothing.
        lengths = [output - 1 for output in outputs]
        decoded = sum(lengths)
        rows.append(
            {
                "answer_tokens": outputs,
                "useful_share": decoded / (decoded + counts.num_padded),
                "formula": decoded / (len(lengths) * max(lengths)),
                "mfu": lab.mfu(streams, counts.busy_seconds),
            }
        )
    return rows


def markdown(name: str, rows: Sequence[dict[str, object]]) -> str:
    def cell(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    heads = list(rows[0])
    lines = [f"### {name}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cell(row[head]) for head in heads) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    print(f"… {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/bench/engine_tables.json"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("stall", "ablation", "chunks", "static"))
    parser.add_argument("--quick", action="store_true", help="small sizes: for a look, not for figures")
    options = parser.parse_args()
    lab = Lab(options.threads)
    tables: dict[str, list[dict[str, object]]] = {}
    for name in ("stall", "ablation", "chunks", "static"):
        if options.only not in (None, name):
            continue
        if name == "chunks":
            tables[name] = chunks(lab, options.quick)
        else:
            work = {"stall": stalls, "ablation": ablation, "static": static}[name]
            tables[name] = asyncio.run(work(lab, options.quick))
        print(markdown(name, tables[name]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"peak_gflops": lab.peak_flops / 1e9, "threads": lab.threads} | tables, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
