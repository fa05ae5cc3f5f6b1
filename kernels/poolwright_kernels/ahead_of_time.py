"""A kernel compiled for a machine that is not here: `AheadOfTimeCase` says what, `compile_case` does it and measures.

Compiling needs no GPU. It must not happen in a process whose kernels are interpreted.
"""

import tempfile
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolwright_kernels.machine_code import Loop, read_machine_code


@dataclass(frozen=True, slots=True)
class AheadOfTimeCase:
    """As triton.compiler.ASTSource and triton.compile take them: constexprs and attributes are keyed by position."""

    label: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a case."""

    registers: int  # of a thread
    stack_bytes: int  # of a thread: where registers are spilled to
    spills: int  # instructions that spill or fetch
    shared_bytes: int  # of a program
    tensor_columns: int  # of tensor memory, of a program
    occupancy: int  # programs that a multiprocessor holds at once; 0: not even one
    widest_load_bits: int
    widest_store_bits: int
    loops: tuple[Loop, ...]


# Of one multiprocessor: CUDA C++ Programming Guide, technical specifications for each compute capability.
_SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
_WARPS = {80: 64, 90: 64, 100: 64, 120: 48}
_PROGRAMS = {80: 32, 90: 32, 100: 32, 120: 24}
_REGISTERS = 65536
_TENSOR_COLUMNS = 512
_RESERVED_SHARED_BYTES = 1024  # of each program

TARGETS = tuple(_WARPS)


def case_of(
    label: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
    odd: Set[str] = frozenset(),
) -> AheadOfTimeCase:
    """`types` gives Triton's type of each argument that has a value at launch, `constants` all others, None where a
    pointer is absent. As at a launch with large tensors, pointers and integers are multiples of 16, except integers in
    `odd`, which may be anything."""
    names: list[str] = kernel.arg_names
    wrong = (types.keys() | constants.keys()) ^ set(names)
    if wrong or types.keys() & constants.keys():
        raise ValueError(f"{label}: {sorted(wrong)} are not arguments of the kernel, or lack a type")
    return AheadOfTimeCase(
        label,
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name in types and types[name] != "fp32" and name not in odd
        },
        options={"num_warps": warps},
    )


def compile_case(case: AheadOfTimeCase, capability: int) -> Compiled:
    """With the Triton that this process has. Raises what Triton raises where the target lacks what the kernel needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(case.kernel, signature=case.signature, constexprs=case.constexprs, attrs=case.attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=case.options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        code = read_machine_code(path, Path(triton.__file__).parent / "backends/nvidia/bin")
    shared = int(compiled.metadata.shared)
    columns = int(getattr(compiled.metadata, "tmem_size", 0) or 0)
    return Compiled(
        registers=code.registers,
        stack_bytes=code.stack_bytes,
        spills=code.spills,
        shared_bytes=shared,
        tensor_columns=columns,
        occupancy=occupancy(capability, case.options["num_warps"], code.registers, shared, columns),
        widest_load_bits=code.widest_load_bits,
        widest_store_bits=code.widest_store_bits,
        loops=code.loops,
    )


def occupancy(capability: int, warps: int, registers: int, shared_bytes: int, tensor_columns: int) -> int:
    """Programs of this size that one multiprocessor holds."""
    registers_of_warp = -(-registers * 32 // 256) * 256  # given out by 256
    warps_by_registers = _REGISTERS // registers_of_warp // 4 * 4  # as many on each of four schedulers
    limits = [
        warps_by_registers // warps,
        _WARPS[capability] // warps,
        _PROGRAMS[capability],
        _SHARED_BYTES[capability] // (shared_bytes + _RESERVED_SHARED_BYTES),
    ]
    if tensor_columns:
        limits.append(_TENSOR_COLUMNS // tensor_columns)
    return min(limits)
