"""Repeated runs of one computation are equal to the bit: what a race, or an order left to chance, would break."""

import torch
from bench.gpu.harness import Bench
from bench.gpu.models import greedy, llama_config, random_weights, runner_of
from bench.gpu.paged import LLAMA_8B, paged_batch

from poolwright_engine.cuda.graphs import graph_sizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_kernels.attention_plan import AttentionShape
from poolwright_kernels.rms_norm import rms_norm
from poolwright_kernels.sampling import sample_tokens


def run(bench: Bench) -> str:
    times = 3 if bench.tiny else 50
    shape = AttentionShape(4, 2, 32, 16) if bench.tiny else LLAMA_8B
    decodes = [(1, context) for context in ((5, 70) if bench.tiny else (1, 511, 4096, 30_000, 17, 2048, 9000))]
    for name, lens in (("decodes", decodes), ("mixed", [(37, 90) if bench.tiny else (1500, 3000), *decodes])):
        call = paged_batch(shape, lens, bench.device).ours()
        first = call().clone()
        same = all(torch.equal(first, call()) for _ in range(times))
        bench.check(f"attention of {name}", same and bool(first.isfinite().all()), times=times)
    x = torch.randn(64, 4096, dtype=torch.bfloat16, device=bench.device)
    weight = torch.randn(4096, dtype=torch.bfloat16, device=bench.device)
    first = rms_norm(x, weight, 1e-5)
    bench.check("rms_norm", all(torch.equal(first, rms_norm(x, weight, 1e-5)) for _ in range(times)), times=times)
    rows, vocab = 16, 500 if bench.tiny else 128_256
    logits = torch.randn(rows, vocab, device=bench.device)
    ones = torch.ones(rows, device=bench.device)
    integers = torch.arange(rows, device=bench.device)
    arguments = (logits, ones, ones.int() * 50, ones * 0.9, ones * 0, integers, integers)
    tokens = sample_tokens(*arguments)
    bench.check("sample_tokens", all(torch.equal(tokens, sample_tokens(*arguments)) for _ in range(times)), times=times)

    config = llama_config(True, vocab_size=2000, layers=4)
    weights = random_weights(config, torch.float32 if not bench.is_cuda else torch.bfloat16, bench.device)
    model = CudaModel(config, weights, 512, bench.device)
    prompts = [tuple((7 * i + j) % 2000 for j in range(20 + 13 * i)) for i in range(6)]
    outputs = []
    for _ in range(2 if bench.tiny else 4):
        runner = runner_of(model, 8, 128, 256, 128, graph_sizes(8, 128))
        outputs.append(greedy(runner, prompts, 8 if bench.tiny else 64, 16))
        runner.close()
    bench.check("tokens of an engine under graphs", all(output == outputs[0] for output in outputs))
    return f"equal to the bit over {times} runs"
