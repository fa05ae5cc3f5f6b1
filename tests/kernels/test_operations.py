"""Every operation as `torch.library` sees it: schema, fake tensors, compilation, and who runs it on a CPU."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import poolwright_kernels.block_copy
import poolwright_kernels.gated_unit
import poolwright_kernels.penalties
import poolwright_kernels.rms_norm
import poolwright_kernels.rotary_write
import poolwright_kernels.sampling  # noqa: F401
from poolwright_kernels.ops import operations, register_cpu, unregister_cpu
from poolwright_kernels.rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def examples() -> dict[str, tuple]:
    """Arguments of a small call of each operation."""
    torch.manual_seed(0)
    long = torch.tensor
    cache, other = torch.randn(2, 2, 4, 4, 2, 8), torch.randn(2, 2, 6, 4, 2, 8)
    row = torch.ones(3)
    query, key, value = torch.randn(3, 8, 8).split((4, 2, 2), dim=1)
    state = (torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 40, dtype=torch.int32))
    logits = torch.randn(3, 40)
    return {
        "rms_norm": (torch.randn(3, 24), torch.randn(24), 1e-5),
        "add_rms_norm": (torch.randn(3, 24), torch.randn(3, 24), torch.randn(24), 1e-5, True),
        "silu_mul": (torch.randn(3, 24),),
        "gelu_mul": (torch.randn(3, 24),),
        "rotary_write": (
            query, key, value, torch.randn(9, 8), long([0, 5, 8]), long([4, -1, 9]), cache[0, 0], cache[1, 0],
            torch.randn(8), torch.randn(8),
        ),
        "copy_blocks": (cache, other, long([1, 2]), long([5, -1])),
        "gather_blocks": (cache, long([3, 1]), 0, 1, 1, 1),
        "scatter_blocks": (torch.randn(2, 1, 2, 4, 1, 8), cache, long([3, 1]), 1, 0),
        "sample_tokens": (logits, row, row.int() * 5, row * 0.9, row * 0.1, long([1, 2, 3]), long([4, 5, 6])),
        "penalize": (logits, long([0, -1, 4]), *state, row * 2, row, row),
        "bias_logits": (logits, long([0, -1]), long([7, 8]), torch.randn(2)),
        "mask_logits": (logits, torch.full((3, 2), 0x5A5A, dtype=torch.int32)),
        "remember_tokens": (long([1, 1, -1]), long([3, 3, 4]), False, *state),
    }  # fmt: skip


ATTENTION = {"hybrid_attention"}  # its tests are with the rest of it
NAMES = sorted(examples())


def test_every_operation_has_an_example() -> None:
    assert set(NAMES) == set(operations()) - ATTENTION


@pytest.mark.parametrize("name", NAMES)
def test_operation_passes_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.poolwright, name).default, examples()[name])


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_get_the_shapes_of_real_ones(name: str) -> None:
    overload = getattr(torch.ops.poolwright, name).default
    real = overload(*examples()[name])
    with FakeTensorMode() as mode:
        arguments = (mode.from_tensor(x) if isinstance(x, Tensor) else x for x in examples()[name])
        fake = overload(*arguments)
    if real is None:
        assert fake is None
    else:
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_a_compiled_function_keeps_the_writes_of_its_operations() -> None:
    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y = rms_norm(x * 2, weight, 1e-5)
        return add_rms_norm(y, residual, weight, 1e-5) + residual

    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    expected_residual = residual.clone()
    expected = block(x, expected_residual, weight)
    result = torch.compile(block, backend="aot_eager", fullgraph=True)(x, residual, weight)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(residual, expected_residual)


@pytest.fixture
def registered() -> Iterator[list[Tensor]]:
    calls: list[Tensor] = []

    def own(gate_up: Tensor) -> Tensor:
        calls.append(gate_up)
        return gate_up[:, ::2] * 0

    register_cpu("silu_mul", own)
    yield calls
    unregister_cpu("silu_mul")


def test_a_cpu_runs_what_was_registered_and_else_the_reference(registered: list[Tensor]) -> None:
    x = torch.ones(2, 4)
    assert torch.equal(torch.ops.poolwright.silu_mul(x), torch.zeros(2, 2))
    assert len(registered) == 1
    unregister_cpu("silu_mul")
    assert torch.ops.poolwright.silu_mul(x).abs().min() > 0


def test_only_a_function_with_the_signature_can_be_registered() -> None:
    with pytest.raises(TypeError, match="gate_up"):
        register_cpu("silu_mul", lambda x: x)
    with pytest.raises(KeyError, match="no operation nothing"):
        register_cpu("nothing", lambda x: x)


def test_a_machine_without_triton_runs_the_references() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
import poolwright_kernels.block_copy, poolwright_kernels.gated_unit, poolwright_kernels.penalties
import poolwright_kernels.rotary_write, poolwright_kernels.sampling
from poolwright_kernels.rms_norm import rms_norm, rms_norm_triton
print(rms_norm(torch.ones(1, 4), torch.ones(4), 0.0))
try:
    rms_norm_triton(torch.ones(1, 4), torch.ones(4), 0.0)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "[[1., 1., 1., 1.]]" in done.stdout
    assert "needs Triton" in done.stdout


# Triton decides from the arguments of a launch alone for what it is compiled, so no GPU is needed to ask. An
# interpreting process cannot: another prints how many compilations random steps of one engine would have made.
COUNT_COMPILATIONS = """
import random
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from poolwright_kernels import block_copy, gated_unit, penalties, rms_norm, rotary_write, sampling

found = {}
for module in (block_copy, gated_unit, penalties, rms_norm, rotary_write, sampling):
    for name, kernel in vars(module).items():
        if name.endswith("_kernel"):
            backend = make_backend(GPUTarget("cuda", 90, 32))
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            def run(*arguments, grid, warmup, bind=bind, name=name, **options):
                _, specialization, _ = bind(*arguments, **options, debug=False)
                found.setdefault(name, set()).add(str(specialization))
            kernel.run = run

draw = random.Random(0)
heads, kv_heads, size, vocab, seats = 6, 2, 64, 1000, 8
cache = torch.zeros(2, 3, 40, 16, kv_heads, size)
bits, counts = torch.zeros(seats, 32, dtype=torch.int32), torch.zeros(seats, vocab, dtype=torch.int32)
for _ in range(25):
    tokens, rows, pairs = draw.randint(1, 70), draw.randint(1, seats), draw.randint(1, 30)
    long = lambda count: torch.ones(count, dtype=torch.int64)
    hidden = torch.zeros(tokens, 576)
    rms_norm.rms_norm_triton(hidden, hidden[0].clone(), 1e-5)
    rms_norm.add_rms_norm_triton(hidden, hidden.clone(), hidden[0].clone(), 1e-5)
    gated_unit.silu_mul_triton(torch.zeros(tokens, 3072))
    query, key, value = torch.zeros(tokens, heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), dim=1)
    layer = draw.randrange(3)
    rotary_write.rotary_write_triton(
        query, key, value, torch.zeros(99, size), long(tokens), long(tokens), cache[0, layer], cache[1, layer]
    )
    first = draw.randrange(3)
    packed = block_copy.gather_blocks_triton(cache, long(pairs), first, draw.randint(1, 3 - first), 0, kv_heads)
    block_copy.scatter_blocks_triton(packed, cache, long(pairs), first, 0)
    block_copy.copy_blocks_triton(cache, torch.zeros(2, 3, 9, 16, kv_heads, size), long(pairs), long(pairs))
    logits = torch.zeros(rows, vocab)
    rates = [torch.ones(rows) for _ in range(3)]
    penalties.remember_tokens_triton(long(tokens), long(tokens), False, bits, counts)
    penalties.penalize_triton(logits, long(rows), bits, counts, *rates)
    penalties.bias_logits_triton(logits, long(pairs), long(pairs), torch.zeros(pairs))
    penalties.mask_logits_triton(logits, torch.zeros(rows, 32, dtype=torch.int32))
    sampling.sample_tokens_triton(logits, rates[0], long(rows).int(), *rates[1:], long(rows), long(rows))
print({name: len(kinds) for name, kinds in sorted(found.items())})
"""


def test_no_step_compiles_anew() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_COMPILATIONS],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    several = {"copy_blocks_kernel": 3, "rms_norm_kernel": 2}  # gather, scatter and copy; without and with the sum
    names = (
        "bias_logits", "copy_blocks", "draw", "gated_unit", "mask_logits", "penalize", "pick", "remember_tokens",
        "rms_norm", "rotary_write", "threshold",
    )  # fmt: skip
    assert ast.literal_eval(done.stdout) == dict.fromkeys((f"{name}_kernel" for name in names), 1) | several
