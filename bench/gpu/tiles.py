"""What one token more than a multiple of a tile costs, in products and in whole steps, each size a graph."""

import torch
from bench.gpu.harness import Bench
from bench.gpu.models import llama_config, random_weights, runner_of, tables_for

from poolwright_engine.cuda.graphs import GraphSizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.scheduling.runner import Row, Step
from poolwright_engine.scheduling.sequence import SamplingParams

TOKENS = (255, 256, 257, 511, 512, 513)


def run(bench: Bench) -> str:
    config = llama_config(bench.tiny) if bench.tiny else llama_config(False, layers=4, vocab_size=32_000)
    dtype = torch.bfloat16 if bench.is_cuda else torch.float32
    weights = random_weights(config, dtype, bench.device)
    model = CudaModel(config, weights, 4096, bench.device)
    runner = runner_of(model, 2, 1024, 2048, 300, GraphSizes(mixed_tokens=TOKENS))
    table = tables_for(1, 2048)[0]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    inputs = {count: torch.randn(count, config.hidden_size, dtype=dtype, device=bench.device) for count in TOKENS}
    product = weights.layers[0].gate_up.weight
    products = bench.seconds({str(count): lambda x=x: x @ product.t() for count, x in inputs.items()})  # type: ignore[misc]
    bench.say(products_of="gate and up of one layer", seconds=products)

    def busy(count: int) -> float:
        step = Step(0, (Row(0, count, (1,) * count, table, True, params),), (0,))
        found = sorted(runner.submit(step).result().busy_seconds for _ in range(2 if bench.tiny else 15))
        return found[len(found) // 2]

    steps = {str(count): busy(count) for count in TOKENS}
    bench.say(steps_of=f"{config.layers} layers", seconds=steps)
    return "one token over a tile: " + ", ".join(
        f"{name} of {full} tokens {100 * (taken[str(full + 1)] / taken[str(full)] - 1):+.0f} %"
        for full in (256, 512)
        for name, taken in (("product", products), ("step", steps))
    )
