"""What the batching strategies do to latency, measured on this engine: four tables, each written to JSON once measured.

    PYTHONPATH=bench python bench/engine_tables.py [--only stall] [--resume] [--quick] [--page] [--threads 1]

- stall: eight streams decode when a long prompt arrives. The largest gap between two tokens of a stream over the usual
  gap, under each strategy and, where prompts are cut, over chunk sizes (Sarathi-Serve, OSDI 2024, figures 1 and 9).
- ablation: hybrid batches only, chunks only, and both, on requests whose lengths are drawn like two data sets of that
  paper, scaled down (its table 4); and what this engine does by default, whose prompts share the budget.
- chunks: what cutting a prompt costs: time against the whole prompt, and KV bytes read again, N-1 times for the first
  of N chunks, N-2 for the second (its section 4.3 and figure 14).
- static: the useful share of request-level batches, counted by the engine, beside Σ Lᵢ / (B · max Lᵢ).

The engine's own loop, scheduler and CPU runner on the small real model. Every row says its MFU: model FLOP per second
over the best that this machine's matrix products reach. All are ratios within one run, or beside their own baseline.

The whole takes at most 12 minutes on an idle machine: a table repeats its measurements in turns while its share of them
lasts (`LIMIT_SECONDS`), and says the median, or for `chunks`, where nothing waits, the least. `--resume` keeps tables
that the file has, `--page` brings `docs/explanation/batching-strategies.md` and its figures up to date, and `--quick`
is for a look at small sizes: to a file of its own, and never to the docs.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from engine_floor import flags

from poolwright.local.model import ensure_demo_model
from poolwright_engine.checkpoint.loader import load_model
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.loop.engine_loop import EngineLoop, Identity, LoopConfig
from poolwright_engine.loop.observer import Observer
from poolwright_engine.model.llama import LlamaModel
from poolwright_engine.scheduling.batching.strategy import Strategy
from poolwright_engine.scheduling.runner import Row, Step
from poolwright_engine.scheduling.scheduler import Batch, Scheduler
from poolwright_engine.scheduling.scheduler_config import Batching
from poolwright_engine.scheduling.sequence import Request, SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
STREAMS = 8
LIMIT_SECONDS = {"stall": 220, "ablation": 330, "chunks": 100, "static": 30}
LONG_PROMPT = 1024
ABLATION_CHUNK = 64
ABLATION_TURNS = 2

Table = list[dict[str, object]]


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


class InLine:
    """Sarathi-Serve's Algorithm 3 to the letter, prompts strictly in line; not `hybrid`: a chunk, then the decodes, in
    turn. For the ablation, which is to differ in nothing else."""

    def __init__(self, hybrid: bool) -> None:
        self._hybrid = hybrid
        self._decodes_next = True

    def fill(self, scheduler: Scheduler, batch: Batch) -> None:
        if self._hybrid or self._decodes_next:
            scheduler.decode_running(batch)
        if self._hybrid or not batch.rows:
            for prompt in (*scheduler.prompts_in_flight(), *scheduler.candidates(batch)):
                tokens = scheduler.piece(batch, prompt, batch.room_for_prefill)
                if not tokens:
                    break
                scheduler.compute(batch, prompt, tokens)
        if not batch.rows:
            scheduler.decode_running(batch)
        self._decodes_next = bool(batch.prefilled)


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
    """One model, an engine for each experiment, and the time since the bench began."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._began = time.monotonic()
        self.threads = threads
        loaded = load_model(ensure_demo_model(), "float32")
        self._model: LlamaModel = loaded.model
        self.shape = loaded.config.compute_shape()
        self.bytes_per_token = loaded.config.kv_shape(torch.float32).bytes_per_token
        first = self.runner()
        first.choose_forms("auto")
        first.close()
        self.peak_flops = _peak_flops()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def runner(self) -> CpuRunner:
        return CpuRunner(self._model, 1 + 20 * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, 64, cpu_threads=self.threads)

    @asynccontextmanager
    async def engine(
        self, batching: Batching, budget: int, counts: Counts, strategy: Strategy | None = None
    ) -> AsyncIterator[EngineLoop]:
        engine = EngineLoop(
            self.runner(),
            config=LoopConfig(
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=budget,
                max_num_seqs=min(64, budget),
                batching=batching,
                enable_prefix_caching=False,
                static_batch_size=STREAMS,
                static_window_seconds=0.5,
            ),
            identity=Identity(pod_uid="bench"),
            eos_token_ids=frozenset(),
            observer=counts,
        )
        if strategy is not None:
            engine.scheduler.strategy = strategy
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


def turns(limit_seconds: float) -> Iterator[int]:
    """Numbers of turns: one, and others while the longest so far fits into what is left."""
    began, longest, number = time.monotonic(), 0.0, 0
    while number == 0 or time.monotonic() - began + longest < limit_seconds:
        turn_began = time.monotonic()
        yield number
        longest = max(longest, time.monotonic() - turn_began)
        number += 1


def _peak_flops() -> float:
    """Of the best of several large float32 products."""
    a, b = torch.randn(1024, 1536), torch.randn(1536, 1536)
    best = math.inf
    with torch.inference_mode():
        for _ in range(20):
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


async def stall(lab: Lab, batching: Batching, budget: int, prompt: int, answer: int) -> dict[str, float]:
    """Eight streams decode; a quarter into their answers one prompt comes."""
    counts, warm = Counts(), answer // 4
    async with lab.engine(batching, budget, counts) as engine:
        streams = [Stream(32, answer) for _ in range(STREAMS)]
        tasks = [asyncio.create_task(run(engine, stream, i)) for i, stream in enumerate(streams)]
        while min(len(stream.token_seconds) for stream in streams) < warm:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        long = Stream(prompt, 2)
        came = time.monotonic()
        await run(engine, long, STREAMS)
        await asyncio.gather(*tasks)
    gaps = [
        (gap, at) for stream in streams for gap, at in zip(stream.gaps, stream.token_seconds[1:], strict=True) if gap
    ]
    usual = statistics.median(gap for gap, at in gaps if at < came)
    largest = max(gap for gap, at in gaps if at >= came)
    return {
        "largest_gap_over_usual": largest / usual,
        "usual_gap_ms": 1000 * usual,
        "largest_gap_ms": 1000 * largest,
        "ttft_of_long_ms": 1000 * long.ttft,
        "mfu": lab.mfu([*streams, long], counts.busy_seconds),
    }


async def stalls(lab: Lab, quick: bool) -> Table:
    """Chunks beside the decodes: a budget of that many tokens and one for each stream."""
    prompt, answer = (256, 24) if quick else (LONG_PROMPT, 64)
    systems: list[tuple[Batching, int | None]] = [
        (batching, None) for batching in (Batching.ORCA, Batching.PREFILL_FIRST, Batching.STATIC)
    ]
    sizes = (64, 256) if quick else (32, 64, 128, 256, 512, 1024)
    systems += [(batching, size) for batching in (Batching.SARATHI, Batching.VLLM) for size in sizes]
    found: dict[tuple[Batching, int | None], list[dict[str, float]]] = {system: [] for system in systems}
    for turn in turns(0 if quick else LIMIT_SECONDS["stall"]):
        for batching, size in systems if turn % 2 == 0 else reversed(systems):
            lab.say(f"stall, turn {turn + 1}: {batching}, " + (f"chunks of {size}" if size else "whole prompts"))
            budget = size + STREAMS if size else MAX_MODEL_LEN
            found[batching, size].append(await stall(lab, batching, budget, prompt, answer))
    rows: Table = []
    whole = _median_of(found[Batching.ORCA, None], "largest_gap_over_usual") - 1
    for (batching, size), measured in found.items():
        middle = {name: _median_of(measured, name) for name in measured[0]}
        cut = 100 * (1 - (middle["largest_gap_over_usual"] - 1) / whole)
        rows.append(
            {
                "batching": batching.value,
                "chunk_tokens": size,
                "prompt_tokens": prompt,
                **middle,
                "spike_cut_percent": cut,
                "turns": len(measured),
            }
        )
    return rows


def _median_of(measured: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in measured)


def drawn(lengths: Lengths, count: int, scale: int, seed: int) -> list[Stream]:
    rng = random.Random(seed)

    def draw(median: int, p90: int, least: int, most: int) -> int:
        sigma = math.log(p90 / median) / 1.2816
        return max(least, min(most, round(median / scale * math.exp(rng.gauss(0, sigma)))))

    return [Stream(draw(*lengths.prompt, 8, 1500), draw(*lengths.output, 4, 200)) for _ in range(count)]


async def ablation(lab: Lab, quick: bool) -> Table:
    """Poisson arrivals, the same for all systems, as many as fit into the time; the machine is busy, not drowned. What
    the turns of a system measure counts together."""
    scale, budget = (32 if quick else 16), ABLATION_CHUNK
    systems: tuple[tuple[str, Batching, int, Callable[[], Strategy] | None], ...] = (
        ("hybrid only", Batching.ORCA, MAX_MODEL_LEN, None),
        ("chunks only", Batching.SARATHI, budget, lambda: InLine(hybrid=False)),
        ("both", Batching.SARATHI, budget, lambda: InLine(hybrid=True)),
        ("both, prompts share", Batching.SARATHI, budget, None),
    )
    rows: Table = []
    for lengths in DATA_SETS:
        lab.say(f"ablation: {lengths.name}, how much this machine can do")
        rate = await _rate(lab, lengths, scale)
        count = 6 if quick else max(8, min(24, int(rate * LIMIT_SECONDS["ablation"] / 9 / ABLATION_TURNS)))
        served: dict[str, list[Stream]] = {name: [] for name, *_ in systems}
        counted = {name: Counts() for name in served}
        for turn in range(1 if quick else ABLATION_TURNS):
            for name, batching, tokens, make in systems if turn % 2 == 0 else reversed(systems):
                lab.say(f"ablation, turn {turn + 1}: {lengths.name}, {name}: {count} requests, {rate:.2f} a second")
                rng, at = random.Random(7 + turn), 0.0
                streams = drawn(lengths, count, scale, seed=11 + turn)
                async with lab.engine(batching, tokens, counted[name], make() if make else None) as engine:
                    tasks = []
                    for number, stream in enumerate(streams):
                        tasks.append(asyncio.create_task(run(engine, stream, number, at)))
                        at += rng.expovariate(rate)
                    await asyncio.gather(*tasks)
                served[name] += streams
        for name, streams in served.items():
            gaps = sorted(gap for stream in streams for gap in stream.gaps)
            rows.append(
                {
                    "lengths": lengths.name,
                    "system": name,
                    "requests": len(streams),
                    "prompt_tokens": sum(stream.prompt for stream in streams),
                    "output_tokens": sum(stream.output for stream in streams),
                    "requests_per_second": rate,
                    "ttft_p50_s": statistics.median(stream.ttft for stream in streams),
                    "tbt_p99_s": gaps[math.ceil(0.99 * len(gaps)) - 1],
                    "mfu": lab.mfu(streams, counted[name].busy_seconds),
                }
            )
    return rows


async def _rate(lab: Lab, lengths: Lengths, scale: int) -> float:
    """Requests per second at 60 % of what a closed loop of eight clients reaches with the same chunks."""
    streams = drawn(lengths, STREAMS, scale, seed=3)
    began = time.monotonic()
    async with lab.engine(Batching.SARATHI, ABLATION_CHUNK, Counts()) as engine:
        await asyncio.gather(*(run(engine, stream, i) for i, stream in enumerate(streams)))
    return 0.6 * len(streams) / (time.monotonic() - began)


async def chunks(lab: Lab, quick: bool) -> Table:
    """One prompt alone, straight on the runner; the sizes take turns."""
    prompt = 512 if quick else 1536
    sizes = [size for size in (32, 64, 128, 256, 257, 512, 1024) if size < prompt] + [prompt]
    rng = random.Random(5)
    ids = tuple(rng.randrange(100, 40_000) for _ in range(prompt))
    table = list(range(1, 2 + prompt // BLOCK_SIZE))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    best: dict[int, float] = {}
    runner = lab.runner()
    try:
        for turn in turns(0 if quick else LIMIT_SECONDS["chunks"]):
            lab.say(f"chunks, turn {turn + 1}")
            for size in sizes:
                seconds = 0.0
                for start in range(0, prompt, size):
                    length = min(size, prompt - start)
                    row = Row(0, length, ids[start : start + length], table, start + length == prompt, params)
                    result = await asyncio.wrap_future(runner.submit(Step(0, (row,), (start,))))
                    seconds += result.busy_seconds
                best[size] = min(seconds, best.get(size, math.inf))
    finally:
        runner.close()
    rows: Table = []
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
                "turns": turn + 1,
            }
        )
    return rows


async def static(lab: Lab, quick: bool) -> Table:
    """Batches of eight whose answers differ ever more in length."""
    rows: Table = []
    for spread in (1, 4, 16) if quick else (1, 2, 4, 8, 16):
        lab.say(f"static: answers from {32 // spread} to 32 tokens")
        outputs = [max(2, round(32 / spread + (32 - 32 / spread) * (i / 7) ** 3)) for i in range(STREAMS)]
        streams = [Stream(16, output) for output in outputs]
        counts = Counts()
        async with lab.engine(Batching.STATIC, MAX_MODEL_LEN, counts) as engine:
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


TABLES = {"stall": stalls, "ablation": ablation, "chunks": chunks, "static": static}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="(default: build/bench/engine_tables.json)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES), help="these tables")
    parser.add_argument("--resume", action="store_true", help="keep tables that the file has")
    parser.add_argument("--quick", action="store_true", help="small sizes: for a look, not for figures")
    parser.add_argument("--page", action="store_true", help="then bring the page of docs/explanation up to date")
    options = parser.parse_args()
    out: Path = options.out or Path(f"build/bench/engine_tables{'.quick' if options.quick else ''}.json")
    known = json.loads(out.read_text()) if out.is_file() else {}
    wanted = [name for name in options.only if not (options.resume and name in known)]
    lab = Lab(options.threads) if wanted else None
    for name in wanted:
        if lab is None:
            break
        began = time.monotonic()
        rows = asyncio.run(TABLES[name](lab, options.quick))
        known[name] = {
            "seconds": round(time.monotonic() - began),
            "flags": flags(),
            "cores": os.cpu_count(),
            "threads": lab.threads,
            "peak_gflops": lab.peak_flops / 1e9,
            "rows": rows,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(known, indent=1) + "\n")
        lab.say(f"{name}: took {known[name]['seconds']} s, written to {out}")
        print(f"### {name}\n\n{markdown(rows)}", flush=True)
    if options.page and not options.quick:
        pages = Path(__file__).with_name("engine_pages.py")  # by itself: nothing else needs matplotlib
        subprocess.run([sys.executable, str(pages), "strategies", str(out)], check=True)
    return 0


def markdown(rows: Table) -> str:
    def cell(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else "–" if value is None else str(value)

    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(cell(row[head]) for head in heads) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
