"""A Llama-8B-shaped model of random weights through the runner: decodes at four sizes and a mixed step, eager and in
graphs. Steps are submitted one ahead of what is read, as the engine's loop does; times are of the whole, host included.
"""

import itertools
import time

import torch
from bench.gpu.harness import Bench
from bench.gpu.models import GREEDY, llama_config, random_weights, runner_of, tables_for

from poolwright_engine.cuda.graphs import NO_GRAPHS, GraphSizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.cuda.runner import CudaRunner
from poolwright_engine.scheduling.runner import Row, Step


def run(bench: Bench) -> str:
    config = llama_config(bench.tiny)
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    context, rounds = (64, 3) if bench.tiny else (1024, 30)
    sizes = (1, 2, 4) if bench.tiny else (1, 8, 64, 256)
    chunk, most = (32 if bench.tiny else 512), sizes[-1]
    began = time.perf_counter()
    model = CudaModel(config, random_weights(config, dtype, bench.device), 2 * context, bench.device)
    bench.synchronize()
    bench.say(weights_seconds=time.perf_counter() - began)
    tables = tables_for(most + 1, context + 64)
    blocks = 1 + sum(map(len, tables))
    results: dict[str, dict[str, float]] = {}
    for label, graph_sizes in (
        ("eager", NO_GRAPHS),
        ("graphs", GraphSizes(decode_rows=sizes, mixed_tokens=(chunk + sizes[-2],))),
    ):
        began = time.perf_counter()
        runner = runner_of(model, most + 1, chunk + most, context + 64, blocks, graph_sizes)
        bench.synchronize()
        bench.say(runner=label, start_seconds=time.perf_counter() - began)
        found = results[label] = {f"decode {size}": _decode(runner, tables, size, context, rounds) for size in sizes}
        found["mixed"] = _mixed(runner, tables, sizes[-2], chunk, context, rounds)
        bench.say(runner=label, step_seconds=found)
        runner.close()
        del runner
        if bench.is_cuda:
            torch.cuda.empty_cache()
    return "ms eager and in graphs: " + ", ".join(
        f"{name} {1e3 * taken:.2f} {1e3 * results['graphs'][name]:.2f}" for name, taken in results["eager"].items()
    )


def _decode(runner: CudaRunner, tables: list[list[int]], size: int, context: int, rounds: int) -> float:
    rows = tuple(Row(slot, 1, (), tables[slot], True, GREEDY, use_last_sampled=True) for slot in range(size))

    def step(number: int) -> Step:
        return Step(number, rows, (context + number,) * size)

    return _each(runner, [step(number) for number in range(rounds)])


def _mixed(runner: CudaRunner, tables: list[list[int]], decodes: int, chunk: int, context: int, rounds: int) -> float:
    """A chunk after half a context, beside decodes."""

    ids = tuple(1 + i % 100 for i in range(chunk))
    rows = [Row(slot, 1, (), tables[slot], True, GREEDY, use_last_sampled=True) for slot in range(decodes)]
    rows.append(Row(len(tables) - 1, chunk, ids, tables[-1], False, GREEDY))

    def step(number: int) -> Step:
        return Step(number, tuple(rows), (*(context + number,) * decodes, context - chunk))

    return _each(runner, [step(number) for number in range(rounds)])


def _each(runner: CudaRunner, steps: list[Step]) -> float:
    """Seconds of a step, the first few aside."""
    warm = len(steps) // 3
    flights = []
    began = 0.0
    for number, step in enumerate(steps):
        flights.append(runner.submit(step))
        if number >= 1:
            flights[number - 1].result()
        if number == warm:
            began = time.perf_counter()
    for handle in itertools.islice(flights, len(flights) - 1, None):
        handle.result()
    return (time.perf_counter() - began) / (len(steps) - 1 - warm + 1)
