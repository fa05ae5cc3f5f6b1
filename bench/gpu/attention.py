"""Attention of typical steps of a Llama-8B-shaped layer: ours, PyTorch's SDPA, FlashInfer and vLLM's unified kernel.

Each as a ratio to ours (above 1: slower than ours) and ours as a share of what memory or arithmetic allow. What was
aimed at is told beside what was found; missing it is no failure of the section.
"""

import torch
from bench.gpu.harness import Bench, relative_error
from bench.gpu.paged import LLAMA_8B, PEERS, paged_batch

from poolwright_kernels.attention_plan import AttentionShape

CASES = {
    "decode 64×4k": [(1, 4096)] * 64,
    "mixed 1×2k + 64×4k": [(2048, 2048), *[(1, 4096)] * 64],
    "prefill 8k": [(8192, 8192)],
    "long decode 8×64k": [(1, 65_536)] * 8,
}

# The least that each case should reach: a ratio to a peer, or a share of the bandwidth that the device is sold with.
GOALS = {
    "decode 64×4k": ("memory", 0.85),
    "mixed 1×2k + 64×4k": ("flashinfer", 1.0),
    "prefill 8k": ("sdpa", 0.7),
}


def run(bench: Bench) -> str:
    shape = AttentionShape(4, 2, 32, 16) if bench.tiny else LLAMA_8B
    bandwidth, rate = bench.roofline()
    lines = []
    for name, full in CASES.items():
        lens = [(max(1, query // 128), max(1, context // 128)) for query, context in full[:5]] if bench.tiny else full
        batch = paged_batch(shape, lens, bench.device)
        ours = batch.ours()
        calls, skipped = {"ours": ours}, {}
        for peer, make in PEERS.items():
            try:
                call = make(batch)
                found = call()
                bench.synchronize()
            except Exception as error:
                skipped[peer] = f"{type(error).__name__}: {error}"[:300]
                continue
            calls[peer] = call
            if peer != "sdpa":  # whose keys are its own
                bench.check(f"{name}: {peer} computes what ours does", relative_error(found, ours().float()) < 3e-2)
        seconds = bench.seconds(calls, rounds=20)
        moved, operations = batch.needs()
        limits = {"memory": moved / bandwidth, "arithmetic": operations / rate}
        bound = max(limits, key=lambda limit: limits[limit])
        share = limits[bound] / seconds["ours"]
        ratios = {peer: taken / seconds["ours"] for peer, taken in seconds.items() if peer != "ours"}
        wanted, least = GOALS.get(name, ("", 0.0))
        reached = (ratios | {limit: limits[limit] / seconds["ours"] for limit in limits}).get(wanted)
        bench.say(
            case=name, seconds=seconds, ratio_to_ours=ratios, bound=bound, share_of_bound=share, skipped=skipped,
            goal={"of": wanted, "least": least, "reached": reached} if wanted else None,
            bytes_per_second=moved / seconds["ours"], operations_per_second=operations / seconds["ours"],
        )  # fmt: skip
        told = ", ".join(f"{peer} {ratio:.2f}×" for peer, ratio in ratios.items())
        goal = f" (goal: {least:g} of {wanted})" if wanted else ""
        lines.append(f"{name}: {share:.2f} of {bound}, {told or 'no peer'}{goal}")
        del batch, ours, calls
        if bench.is_cuda:
            torch.cuda.empty_cache()
    return "; ".join(lines)
