"""One launch of a mixed step's attention against two launches on two streams, over several mixes."""

from bench.gpu.harness import Bench
from bench.gpu.paged import LLAMA_8B, paged_batch
from bench.gpu.two_launches import two_launches

from poolwright_kernels.attention_plan import AttentionShape

MIXES = {
    "512 at 4k + 64×4k": [(512, 4096), *[(1, 4096)] * 64],
    "2k + 64×4k": [(2048, 2048), *[(1, 4096)] * 64],
    "2k + 16×1k": [(2048, 2048), *[(1, 1024)] * 16],
    "4×512 + 128×2k": [*[(512, 512)] * 4, *[(1, 2048)] * 128],
    "256 at 8k + 8×32k": [(256, 8192), *[(1, 32_768)] * 8],
}


def run(bench: Bench) -> str:
    shape = AttentionShape(4, 2, 32, 16) if bench.tiny else LLAMA_8B
    lines = []
    for name, full in MIXES.items():
        lens = [(max(1, query // 64), max(2, context // 64)) for query, context in full[:6]] if bench.tiny else full
        batch = paged_batch(shape, lens, bench.device)
        seconds = bench.seconds({"one": batch.ours(), "two": two_launches(batch)})
        bench.say(mix=name, seconds=seconds, two_over_one=seconds["two"] / seconds["one"])
        lines.append(f"{name} {seconds['two'] / seconds['one']:.2f}")
    return "two launches over one: " + ", ".join(lines)
