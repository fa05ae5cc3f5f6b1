"""What a runner over the kernels launches, step after step, is compiled before the first of them."""

import ast
import os
import subprocess
import sys
from pathlib import Path

# Triton decides from the arguments of a launch alone for what it is compiled, so no GPU is needed to ask. An
# interpreting process cannot: another prints, of each kernel, what warming compiled, and what random steps added.
COUNT_COMPILATIONS = """
import random
import sys
from pathlib import Path
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from poolwright_engine.checkpoint.loader import load_model
from poolwright_engine.cuda.graphs import GraphSizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.cuda.runner import CudaRunner
from poolwright_engine.scheduling.runner import Seat
from poolwright_kernels import (
    block_copy, decode_plan, gated_unit, hybrid_attention, penalties, rms_norm, rotary_write, sampling
)
from poolwright_kernels.ops import register_cpu
from support.placed import placed, step_of
from support.runner_pair import PARAMS
from support.tiny_llama import write_tiny_llama

found = {}
for module in (block_copy, decode_plan, gated_unit, hybrid_attention, penalties, rms_norm, rotary_write, sampling):
    for name, value in list(vars(module).items()):
        if name.endswith("_kernel"):
            backend = make_backend(GPUTarget("cuda", 90, 32))
            bind = create_function_from_signature(value.signature, value.params, backend)
            def run(*arguments, grid, warmup, bind=bind, name=name, **options):
                assert all(size > 0 for size in grid)
                _, specialization, _ = bind(*arguments, **options, debug=False)
                found.setdefault(name, set()).add(str((specialization, options["num_warps"])))
            value.run = run
        elif name.endswith("_triton"):
            register_cpu(name.removesuffix("_triton"), value)

torch.set_num_threads(1)
wanted = [params for params in PARAMS if params.guide is None]
longest, slots = 208, 5
window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}


def compiled(folder, changes, **options):
    found.clear()
    loaded = load_model(write_tiny_llama(folder, **changes), "bfloat16")
    runner = CudaRunner(
        CudaModel(loaded.config, loaded.model.weights, longest, torch.device("cpu")),
        num_blocks=70, block_size=16, max_num_seqs=slots, max_num_batched_tokens=250, max_model_len=longest,
        num_host_blocks=7, decodes_planned=True, **options,
    )
    runner.warm()
    warm = {name: len(kinds) for name, kinds in found.items()}
    drive(runner)
    runner.close()
    return warm, {name: len(kinds) - warm.get(name, 0) for name, kinds in found.items()}


def drive(runner):
    draw = random.Random(0)
    places = {}
    for number in range(40):
        rows = []
        decodes = number % 3 == 0
        for slot in draw.sample(range(slots), draw.randint(1, slots)):
            if slot not in places or draw.random() < 0.1 or places[slot][1] > 150:
                places[slot] = [draw.choice(wanted), 0, [1 + slot * 13 + i for i in range(13)]]
            params, start, table = places[slot]
            length = 1 if decodes else draw.choice((1, 1, 2, 3, 16, 17, 45))
            guesses = draw.randint(0, min(3, length - 1)) if start else 0
            ids = tuple(draw.randrange(256) for _ in range(length))
            seat = Seat(ids, (7,)) if start == 0 and params.needs_history else None
            samples = guesses > 0 or draw.random() < 0.8
            rows.append(placed(slot, start, length, ids, table, samples, params, num_draft=guesses, seat=seat))
            places[slot][1] += length
        runner.submit(step_of(number, tuple(rows))).result()
        blocks = draw.sample(range(1, 70), draw.randint(1, 7))
        first = draw.randrange(runner.kv_shape.layers)
        layers = range(first, draw.randint(first + 1, runner.kv_shape.layers))
        heads = range(runner.kv_shape.kv_heads)
        runner.write_blocks(layers, heads, blocks, runner.read_blocks(layers, heads, blocks).result()).result()
        runner.swap_out(blocks, range(len(blocks)))
        runner.swap_in(range(len(blocks)), blocks)


print([
    compiled(Path(sys.argv[1]), window, sizes=GraphSizes((1, 2, 4, 5), (16, 64))),
    compiled(Path(sys.argv[1]), {}, cache_dtype=torch.float8_e4m3fn),
])
"""


def test_no_step_compiles_what_warming_did_not(tmp_path: Path) -> None:
    """Steps padded to graphs' sizes over a window; steps as they are over an fp8 cache."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", COUNT_COMPILATIONS, str(tmp_path)],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for warm, added in ast.literal_eval(done.stdout):
        assert warm["hybrid_attention_kernel"] == 2  # with chunks, and of decodes only
        assert warm.keys() >= {"penalize_kernel", "bias_logits_kernel", "mask_logits_kernel", "copy_blocks_kernel"}
        assert added == dict.fromkeys(added, 0)
