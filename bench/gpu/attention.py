"""Attention of typical steps of a Llama-8B-shaped layer: ours, PyTorch's SDPA, FlashInfer and vLLM's unified kernel.

Each as a ratio to ours (above 1: slower than ours) and ours as a share of what memory or arithmetic allow. What was
aimed at is told beside what was found; missing it is no failure of the section.
"""

from collections.abc import Sequence

import torch
from bench.gpu.harness import Bench, relative_error
from bench.gpu.paged import LLAMA_8B, PEERS, PagedBatch, paged_batch

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


# Those that may compile when they are first called come last: where they take all the time, the rest is written.
PASSES = (("sdpa",), ("flashinfer", "vllm"))


def run(bench: Bench) -> str:
    shape = AttentionShape(4, 2, 32, 16) if bench.tiny else LLAMA_8B
    lines = dict.fromkeys(CASES, "")
    for peers in PASSES:
        for name, full in CASES.items():
            lens = [(max(1, q // 128), max(1, context // 128)) for q, context in full[:5]] if bench.tiny else full
            lines[name] += _case(bench, name, paged_batch(shape, lens, bench.device), peers)
            if bench.is_cuda:
                torch.cuda.empty_cache()
    return "; ".join(f"{name}: {found}{_goal(name)}" for name, found in lines.items())


def _case(bench: Bench, name: str, batch: PagedBatch, peers: Sequence[str]) -> str:
    """What was found, in a few words."""
    ours = batch.ours()
    calls, skipped = {"ours": ours}, {}
    for peer in peers:
        try:
            call = PEERS[peer](batch)
            found = call()
            bench.synchronize()
        except Exception as error:
            skipped[peer] = f"{type(error).__name__}: {error}"[:300]
            continue
        calls[peer] = call
        if peer != "sdpa":  # whose keys are its own
            bench.check(f"{name}: {peer} computes what ours does", relative_error(found, ours().float()) < 3e-2)
    if skipped:
        bench.say(case=name, skipped=skipped)
    is_first = peers == PASSES[0]
    if not is_first and len(calls) == 1:
        return ""
    seconds = bench.seconds(calls, rounds=20)
    bandwidth, rate = bench.roofline()
    moved, operations = batch.needs()
    shares = {"memory": moved / bandwidth / seconds["ours"], "arithmetic": operations / rate / seconds["ours"]}
    ratios = {peer: taken / seconds["ours"] for peer, taken in seconds.items() if peer != "ours"}
    bound = max(shares, key=lambda limit: shares[limit])
    wanted, least = GOALS.get(name, ("", 0.0))
    reached = (ratios | shares).get(wanted)
    bench.say(
        case=name, seconds=seconds, ratio_to_ours=ratios, bound=bound, share_of_bound=shares[bound],
        goal={"of": wanted, "least": least, "reached": reached} if reached is not None else None,
        bytes_per_second=moved / seconds["ours"], operations_per_second=operations / seconds["ours"],
    )  # fmt: skip
    told = [f"{shares[bound]:.2f} of {bound}"] if is_first else [""]
    return ", ".join(told + [f"{peer} {ratio:.2f}×" for peer, ratio in ratios.items()])


def _goal(name: str) -> str:
    wanted, least = GOALS.get(name, ("", 0.0))
    return f" (goal: {least:g} of {wanted})" if wanted else ""
