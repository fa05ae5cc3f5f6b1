"""Machines of the papers that the simulator's own tables do not hold as they are: Yi-34B as Sarathi-Serve measured it,
OPT cut into pipeline stages, and the link between GPUs of a node."""

from functools import cache

from poolwright.sim import data_files
from poolwright.sim.profiles import Curve, DecodeTable, Parts, TableStepTime, distserve_machines
from poolwright.sim.step_time import MachineModel
from poolwright_protocol.kv import KVShape
from poolwright_protocol.least_squares import cost_weights

YI_34B = KVShape(layers=60, kv_heads=8, head_size=128, dtype_bytes=2)
_YI_WEIGHT_BYTES = 34.4e9 * 2
_CONTEXTS = (0.0, 1e6)


@cache
def yi_34b() -> MachineModel:
    """Two A100, tensor parallel: iteration times of Sarathi-Serve (OSDI 2024; Apache-2.0), Python and all.

    - Prompts were measured whole. What grows with the square of their length is taken for attention (least squares of
      relative errors over fixed + linear + square), so that a chunk pays for reading what is before it.
    - Decodes were measured at contexts of 1,024 tokens alone, and cost the same here at any context.
    - A prompt of 1,021 tokens beside 3 decodes took what one of 1,024 takes, so tokens of both share the products.
    - The first batch of the run, 256 tokens in 121 ms where 512 take 106, is left out.

    Memory: 90 % of the GPUs' less the weights."""
    prompts = {
        int(row["batch_num_prefill_tokens"]): float(row["batch_execution_time"])
        for row in data_files.rows("sarathi_yi34b_prefill_iteration.csv")
        if float(row["Batch Id"]) > 0
    }
    decodes = {
        int(row["batch_num_decode_tokens"]): float(row["batch_execution_time"])
        for row in data_files.rows("sarathi_yi34b_decode_iteration.csv")
    }
    *_, square = cost_weights([((1.0, float(n), float(n * n)), seconds) for n, seconds in prompts.items()])
    knots = {1.0: decodes[1]} | {float(n): seconds - square * n * n for n, seconds in prompts.items()}
    tokens = Curve(knots)
    beside = {(b, c): max(0.0, seconds - tokens(b)) for b, seconds in decodes.items() for c in _CONTEXTS}
    squares = {float(n): square * n * n for n in range(0, 16385, 64)}
    parts = Parts(tokens, DecodeTable(beside), chunk_attention=Curve(squares, power=2))
    room = 2 * 0.9 * (80 << 30) - _YI_WEIGHT_BYTES
    name = "sarathi-a100-yi-34b-tp2"
    capacity = int(room / YI_34B.bytes_per_token)
    return MachineModel(name, TableStepTime(name, parts), capacity, YI_34B.bytes_per_token, gpus=2)


def opt(model: str, tensor: int, pipeline: int = 1) -> MachineModel:
    """`model`: opt-13b or opt-66b. DistServe's fits of one stage's whole depth, cut into equal stages, and its KV
    capacities. What stages send each other takes no time."""
    base = distserve_machines()[f"distserve-a100-{model}-tp{tensor}"]
    (capacity,) = (
        int(row["max_num_tokens"])
        for row in data_files.rows("distserve_max_num_tokens.csv")
        if (row["model"], row["tp"], row["pp"]) == (f"facebook/{model}", str(tensor), str(pipeline))
    )
    return base._replace(
        name=f"{base.name}-pp{pipeline}",
        kv_capacity_tokens=capacity,
        gpus=tensor * pipeline,
        pipeline_stages=pipeline,
        dollars_per_hour=None,
        watts=None,
    )


def nvlink_bytes_per_second() -> float:
    """Between two A100 of a node, as Vidur measured sends (MIT), at the largest size there."""
    rows = [
        (int(row["bytes"]), float(row["median_ms"]))
        for row in data_files.rows("vidur_send_recv.csv")
        if (row["machine"], row["place"]) == ("a100_dgx", "in a node")
    ]
    num_bytes, milliseconds = max(rows)
    return num_bytes / milliseconds * 1e3
