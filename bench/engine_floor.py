"""What this machine allows a model: its flags, how fast it reads memory, the best of several product forms, and from
them the least time of a decode and of a prefill step; beside it what the engine's forward pass takes.

    python bench/engine_floor.py [--model FILE] [--dtype float32] [--threads N] [--json FILE]

The bound of a step is the best form of every product of the model at that number of rows, and nothing else: attention,
norms and Python are what lies between it and the engine.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from poolwright.local.model import ensure_demo_model
from poolwright_engine.checkpoint.loader import DTYPES, load_model
from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.model.linear import Int4Linear, Linear, Quantization, choose_forms, quantized, use_huge_pages
from poolwright_engine.model.llama import KVCache, LlamaModel
from poolwright_engine.model.operations import operations
from poolwright_engine.native.library import CpuOperations

ROWS = (1, 8, 64, 512)
HEAD_ROWS = 16  # steps of many tokens sample few
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "avx_vnni")
_READ_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Floor:
    """Milliseconds of all products of the model, each in its best form, by rows; of the engine's step; and of that step
    where all beside its products is computed by PyTorch's operations."""

    rows: int
    forms: dict[str, float]
    bound_milliseconds: float
    engine_milliseconds: float
    torch_milliseconds: float


def flags() -> list[str]:
    info = Path("/proc/cpuinfo")
    found = info.read_text().split("flags", 1)[-1].split("\n", 1)[0].split() if info.is_file() else []
    return [flag for flag in _FLAGS if flag in found]


def read_gigabytes_per_second(rounds: int = 5) -> float:
    values = torch.ones(_READ_BYTES // 4)
    use_huge_pages([(values.data_ptr(), values.nbytes)])
    return float(values.nbytes / 1e9 / min(seconds(values.sum) for _ in range(rounds)))


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def forms_of(product: Linear, dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], object]]:
    weight = product.weight
    transposed = weight.t().contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    forms: dict[str, Callable[[torch.Tensor], object]] = {
        "rows": lambda x: F.linear(x, weight),
        "columns": lambda x: (weight @ x.t()).t(),
        "transposed": lambda x: x @ transposed,
        "packed": lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
        "int8": quantized(Quantization.INT8, CpuOperations.AUTO, "down_proj", weight, None),
        "int8 fine": quantized(Quantization.INT8, CpuOperations.AUTO, "qkv_proj", weight, None),
    }
    if Int4Linear.takes(weight):
        forms["int4"] = Int4Linear(weight)
    return forms


def measure(model: LlamaModel, rows: int, rounds: int, sample_layers: int) -> tuple[dict[str, float], float]:
    """Milliseconds of all products by form, and of each product's best form at full precision, summed."""
    layers = model.weights.layers[:sample_layers]
    groups: list[tuple[Sequence[Linear], float, int]] = [
        ([getattr(layer, name) for layer in layers], len(model.weights.layers) / len(layers), rows)
        for name in ("qkv", "output", "gate_up", "down")
    ]
    groups.append(([model.weights.lm_head], 1.0, min(rows, HEAD_ROWS)))
    totals: dict[str, float] = {}
    bound = 0.0
    for products, weight, group_rows in groups:
        x = torch.randn(group_rows, products[0].in_features).to(model.dtype)
        forms = [forms_of(product, model.dtype) for product in products]
        names = [name for name in forms[0] if all(name in of_product for of_product in forms)]
        best = dict.fromkeys(names, float("inf"))
        for _ in range(rounds):
            for name in names:
                runs = [of_product[name] for of_product in forms]
                best[name] = min(best[name], seconds(lambda runs=runs, x=x: [run(x) for run in runs]) * weight * 1e3)  # type: ignore[misc]
        for name in names:
            totals[name] = totals.get(name, 0.0) + best[name]
        bound += min(best[name] for name in ("rows", "columns", "transposed", "packed"))
    return totals, bound


def engine_steps(models: Sequence[LlamaModel], rows: int, rounds: int, context: int = 144) -> list[float]:
    """Milliseconds of each model in turns: decodes at that context up to 16 rows, else prompts of 128 tokens."""
    model = models[0]
    spans = [(context, 1)] * rows if rows <= 16 else [(0, min(128, rows))] * (rows // min(128, rows))
    first, attention_rows = 1, []
    for start, length in spans:
        blocks = -(-(start + length) // 16)
        attention_rows.append(AttentionRow(start, length, list(range(first, first + blocks))))
        first += blocks
    cache = KVCache(model.config.kv_shape(model.dtype), first + 1, 16, model.dtype)
    ids = torch.ones(sum(length for _, length in spans), dtype=torch.int64)
    ends = [sum(length for _, length in spans[: index + 1]) - 1 for index in range(len(spans))]
    best = [float("inf")] * len(models)
    for _ in range(rounds):
        for index, each in enumerate(models):
            taken = seconds(lambda each=each: each.forward(ids, attention_rows, cache, ends))  # type: ignore[misc]
            best[index] = min(best[index], taken * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="What this machine allows, and how near the engine is.")
    parser.add_argument("--model", type=Path, help="(default: SmolLM2-135M)")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-layers", type=int, default=8, help="whose products are measured (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        loaded = load_model(options.model or ensure_demo_model(), options.dtype)
        model = loaded.model
        by_torch = operations(CpuOperations.TORCH, loaded.config, model.dtype)
        models = (model, LlamaModel(loaded.config, model.weights, by_torch))
        gigabytes = read_gigabytes_per_second()
        print(f"{platform.machine()}, {options.threads} threads, {' '.join(flags())}; reads {gigabytes:.1f} GB/s")
        measured = {rows: measure(model, rows, options.rounds, options.sample_layers) for rows in ROWS}
        chosen = choose_forms(model.weights.products())
        floors = [
            Floor(rows, forms, bound, *engine_steps(models, rows, options.rounds))
            for rows, (forms, bound) in measured.items()
        ]
    names = [name for name in floors[0].forms if all(name in floor.forms for floor in floors)]
    print(f"{options.dtype}: milliseconds of all products (the head on at most {HEAD_ROWS} rows) and of a step")
    print(
        "rows  "
        + "  ".join(f"{name:>10}" for name in names)
        + "       bound      engine   bound / engine    by PyTorch"
    )
    for floor in floors:
        print(
            f"{floor.rows:4}  "
            + "  ".join(f"{floor.forms[name]:10.1f}" for name in names)
            + f"  {floor.bound_milliseconds:10.1f}  {floor.engine_milliseconds:10.1f}   "
            + f"{floor.bound_milliseconds / floor.engine_milliseconds:14.2f}  {floor.torch_milliseconds:12.1f}"
        )
    weights = sum(product.out_features * product.in_features for product in model.weights.products())
    reading = weights * model.dtype.itemsize / gigabytes / 1e6
    print(f"reading {weights / 1e6:.0f} M weights once takes {reading:.1f} ms: no decode step is shorter")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "flags": flags(),
            "threads": options.threads,
            "dtype": options.dtype,
            "read_gigabytes_per_second": gigabytes,
            "read_once_milliseconds": reading,
            "floors": [asdict(floor) for floor in floors],
            "forms": [str(choice) for choice in chosen],
            "mean_share_of_bound": statistics.fmean(f.bound_milliseconds / f.engine_milliseconds for f in floors),
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
