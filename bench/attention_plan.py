"""What the host pays to plan one step of hybrid attention: `python bench/attention_plan.py [--requests N]`.

A mixed step of a Llama-8B-shaped model on 132 multiprocessors: some chunks that fill a budget of 2048 tokens, and
decodes over contexts of up to 8192 tokens. A step of decodes only is planned on the device and costs one launch; what
the host would take is shown for comparison. Prints the best, the median and the 90th percentile.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from poolwright_kernels.attention_plan import AttentionShape, PlanCapacity, PlanLayout, lanes_of, plan_on_host
from poolwright_kernels.attention_tiles import tiles_for

MULTIPROCESSORS = 132
TOKEN_BUDGET = 2048
LONGEST_CONTEXT_TOKENS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=4, help="how many of the requests are in prefill")
    parser.add_argument("--rounds", type=int, default=3000)
    options = parser.parse_args()

    shape = AttentionShape(heads=32, kv_heads=8, head_size=128, page_size=16)
    tiles = tiles_for(shape.head_size, shape.group, has_chunks=True)
    lanes = lanes_of(shape, MULTIPROCESSORS * tiles.programs_per_multiprocessor)
    layout = PlanLayout(shape, tiles, PlanCapacity(options.requests, 8192), lanes, has_chunks=True)
    into = np.empty(layout.offsets[-1], np.int32)

    random = np.random.default_rng(0)
    mixed = np.ones(options.requests, np.int32)
    mixed[: options.chunks] = (TOKEN_BUDGET - options.requests) // options.chunks
    context = (random.integers(0, LONGEST_CONTEXT_TOKENS, options.requests) + mixed).astype(np.int32)
    ones = np.ones_like(mixed)

    def plan(query_lens: npt.NDArray[np.int32], window: int) -> Callable[[], object]:
        return lambda: plan_on_host(layout, query_lens, context, window, into)

    for name, call in {
        "mixed": plan(mixed, 0),
        "mixed, window 512": plan(mixed, 512),
        "decodes, on the host": plan(ones, 0),
    }.items():
        best, median, late = microseconds(call, options.rounds)
        print(f"{name:22} {options.requests} requests: best {best:.0f} µs, median {median:.0f} µs, p90 {late:.0f} µs")


def microseconds(call: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    taken = np.empty(rounds)
    for round_ in range(rounds):
        start = time.perf_counter()
        call()
        taken[round_] = time.perf_counter() - start
    return tuple(np.percentile(taken, (0, 50, 90)) * 1e6)


if __name__ == "__main__":
    main()
