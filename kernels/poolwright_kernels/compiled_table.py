"""The tables of compiled kernels: what is in them, what each row must satisfy, and their files.

A row is one subject (a kernel with its constants) for one version of Triton and one target. Attention has a table of
its own, which takes long to make; the other has all other operations. Each row carries a digest of the kernel's code
and of its case: a row that is older than the kernels is seen to be so, and the others stay true. A file may lack rows.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolwright_kernels import operation_cases as cases
from poolwright_kernels.ahead_of_time import TARGETS, AheadOfTimeCase, Compiled
from poolwright_kernels.attention_cases import ahead_of_time_cases
from poolwright_kernels.attention_tiles import tiles_for
from poolwright_kernels.machine_code import Loop

PATHS = {family: Path(__file__).with_name(f"compiled_{family}.json") for family in ("operations", "attention")}

# The oldest that the project supports, what its PyTorch (2.13) pins, and the newest on PyPI, which the newest PyTorch
# (2.15) pins.
TRITON_VERSIONS = ("3.6.0", "3.7.1", "3.9.0")

_HEAD_SIZES = (64, 96, 128, 256)
_GROUPS = (1, 3, 4, 8)  # of rotary_write
MOST_GROUPED = 16  # query heads for a KV head: attention of any number up to this makes the same launches
_FORMATS = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8e4nv"))  # of queries, of the cache
_VARIANTS = ("", " window", " soft-cap")
_BOTH = " window soft-cap"  # of bfloat16 queries and the larger heads: as Gemma 2 has it in every other layer
_NO_FP8 = (90, 100, 120)  # sm_80 has no instruction for e4m3, and Triton refuses it
_BEST = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}  # for tiles of 64 rows and more; one warp's mma for fewer

# Bytes of stack that a row may use, outside its loops, by (subject, Triton, target). Only sm_120, the target of
# workstations, may be here.
NAMED_SPILLS: dict[tuple[str, str, int], int] = {}

_MEASURE = 1  # raised when a row says something else of the same machine code
_DIGEST_CHARACTERS = 12  # of a case's digest, in a file

Key = tuple[str, str, int]  # subject, Triton, target


@dataclass(frozen=True, slots=True)
class Subject:
    """`large_loops`, `small_loops`: loops over tiles of many and of few rows, in this order; none where no matrices are
    multiplied. `width_bits`: the least that its widest load and store must have."""

    name: str
    case: Callable[[int], AheadOfTimeCase]  # by target: tiles may differ
    targets: tuple[int, ...] = TARGETS
    large_loops: Callable[[int], int] = lambda target: 0
    small_loops: int = 0
    width_bits: int = 0


@functools.cache
def subjects() -> dict[str, Subject]:
    every = [*_attention(), *_operations()]
    named = {subject.name: subject for subject in every}
    assert len(named) == len(every), "two subjects of one name"
    return named


def keys(family: str | None = None) -> list[Key]:
    """All rows that a table is to have, or both."""
    every = (
        (s.name, version, target) for version in TRITON_VERSIONS for s in subjects().values() for target in s.targets
    )
    return [key for key in every if family in (None, family_of(key[0]))]


def family_of(name: str) -> str:
    return "attention" if name.startswith("attention ") else "operations"


def faults(key: Key, row: Compiled) -> list[str]:
    """What is wrong with a row, in words."""
    name, _, target = key
    subject = subjects()[name]
    large_loops = subject.large_loops(target)
    wrong = []
    if row.stack_bytes > NAMED_SPILLS.get(key, 0) or (row.spills and key not in NAMED_SPILLS):
        wrong.append(f"{row.stack_bytes} B of registers spilled")
    if any(loop.spills for loop in row.loops):
        wrong.append("a loop spills")
    if row.occupancy == 0:
        wrong.append("does not fit on a multiprocessor")
    if min(row.widest_load_bits, row.widest_store_bits) < subject.width_bits:
        wrong.append(f"loads of {row.widest_load_bits} and stores of {row.widest_store_bits} bits")
    multiplying = [loop for loop in row.loops if loop.matrix]
    if len(multiplying) != large_loops + subject.small_loops:
        wrong.append(f"{len(multiplying)} loops over tiles, not {large_loops} + {subject.small_loops}")
    for index, loop in enumerate(multiplying):
        wanted = _BEST[target] if index < large_loops else "mma"
        if [kind for kind, _ in loop.matrix] != [wanted]:
            wrong.append(f"loop {index + 1} multiplies by {', '.join(kind for kind, _ in loop.matrix)}, not {wanted}")
        if loop.asynchronous_copies == 0:
            wrong.append(f"loop {index + 1} copies nothing while it computes")
    return wrong


@functools.cache
def case_digest(key: Key) -> str:
    name, version, target = key
    return digest_of(subjects()[name].case(target), version, target)


def digest_of(case: AheadOfTimeCase, version: str, target: int) -> str:
    """Of all that decides what a row will be: the kernel's code with all it calls, the case, Triton and the target."""
    facts = (
        _MEASURE,
        _code_digest(case.kernel.fn),
        case.signature,
        sorted((places, repr(value)) for places, value in case.constexprs.items()),
        sorted(case.attrs.items()),
        sorted(case.options.items()),
        version,
        target,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def read_table(path: Path) -> dict[Key, tuple[str, Compiled]]:
    """Each row with the beginning of the digest of what it was compiled from; none where there is no file."""
    if not path.exists():
        return {}
    return {
        (name, version, int(target)): (digest, unpacked(row))
        for name, versions in json.loads(path.read_text())["rows"].items()
        for version, targets in versions.items()
        for target, (digest, *row) in targets.items()
    }


def current_rows(family: str, path: Path) -> dict[Key, Compiled]:
    """Of a file: the rows that are of the kernels as they are."""
    stored = read_table(path)
    return {
        key: stored[key][1] for key in keys(family) if key in stored and case_digest(key).startswith(stored[key][0])
    }


def write_table(family: str, rows: Mapping[Key, Compiled], path: Path) -> None:
    """One line for each subject."""
    by_subject: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for key in keys(family):
        if key in rows:
            name, version, target = key
            targets = by_subject.setdefault(name, {}).setdefault(version, {})
            targets[str(target)] = [case_digest(key)[:_DIGEST_CHARACTERS], *packed(rows[key])]
    columns = ["digest", *(field.name for field in dataclasses.fields(Compiled))]
    loop_columns = [field.name for field in dataclasses.fields(Loop)]
    lines = [f"    {json.dumps(name, ensure_ascii=False)}: {_json(row)}" for name, row in sorted(by_subject.items())]
    path.write_text(
        "{\n"
        f'  "columns": {_json(columns)},\n'
        f'  "loop_columns": {_json(loop_columns)},\n'
        '  "rows": {\n' + ",\n".join(lines) + "\n  }\n}\n"
    )


def packed(row: Compiled) -> list[Any]:
    """Without names, in the order of the fields."""
    *numbers, loops = dataclasses.astuple(row)
    return [*numbers, [[n, [list(pair) for pair in matrix], *others] for n, matrix, *others in loops]]


def unpacked(row: list[Any]) -> Compiled:
    *numbers, loops = row
    return Compiled(*[*numbers, tuple(_loop(*loop) for loop in loops)])


def _loop(instructions: int, matrix: list[list[Any]], copies: int, loads: int, spills: int) -> Loop:
    return Loop(instructions, tuple((kind, count) for kind, count in matrix), copies, loads, spills)


def _attention() -> Iterator[Subject]:
    for head in _HEAD_SIZES:
        for dtype, kv_dtype in _FORMATS:
            targets = TARGETS if kv_dtype == dtype else _NO_FP8
            shape = f"{head} {dtype}{' fp8-kv' if kv_dtype != dtype else ''}"
            for variant in (*_VARIANTS, _BOTH) if dtype == "bf16" and head in (128, 256) else _VARIANTS:
                launch = functools.partial(_launch, head, dtype, kv_dtype, variant)
                large = functools.partial(_large_loops, head, 2 if kv_dtype == dtype else 1, variant)
                mixed, decode = functools.partial(launch, "mixed"), functools.partial(launch, "decode")
                yield Subject(f"attention mixed {shape}{variant}", mixed, targets, large, small_loops=1)
                yield Subject(f"attention decode {shape}{variant}", decode, targets, small_loops=1)
        yield Subject(f"attention merge {head} bf16", functools.partial(_launch, head, "bf16", "bf16", "", "merge"))
    yield Subject("attention plan", functools.partial(_launch, 128, "bf16", "bf16", "", "plan"))


def _large_loops(head: int, cache_bytes: int, variant: str, target: int) -> int:
    """The window's edge, what all rows see, the causal edge; or all of it in one."""
    if tiles_for(head, MOST_GROUPED, has_chunks=True, capability=target, cache_bytes=cache_bytes).one_large_loop:
        return 1
    return 3 if "window" in variant else 2


def _launch(head: int, dtype: str, kv_dtype: str, variant: str, label: str, target: int) -> AheadOfTimeCase:
    every = ahead_of_time_cases(
        head, MOST_GROUPED, target, dtype, kv_dtype, window="window" in variant, soft_cap="soft-cap" in variant
    )
    return next(case for case in every if case.label == label)


def _operations() -> Iterator[Subject]:
    def subject(case: AheadOfTimeCase, dtype: str, width: int, targets: tuple[int, ...] = TARGETS) -> Subject:
        kernel = case.kernel.__name__.removesuffix("_kernel").replace("_", " ")
        name = " ".join(part for part in (kernel, case.label, dtype) if part)
        return Subject(name, lambda target: case, targets, width_bits=width)

    for dtype in ("bf16", "fp16"):
        for hidden in cases.HIDDEN_SIZES:
            for add in (False, True):
                for plus_one in (False, True):
                    yield subject(cases.norm_case(hidden, dtype, add, plus_one), dtype, 128)
        for width in cases.MLP_WIDTHS:
            for gelu in (False, True):
                yield subject(cases.gated_case(width, dtype, gelu), dtype, 128)
    for head in _HEAD_SIZES:
        for group in _GROUPS:
            yield subject(cases.rotary_case(head, group, "bf16", "bf16", normed=False), "bf16", 128)
        yield subject(cases.rotary_case(head, 4, "bf16", "bf16", normed=True), "bf16", 128)
        yield subject(cases.rotary_case(head, 4, "fp16", "fp16", normed=False), "fp16", 128)
        yield subject(cases.rotary_case(head, 4, "bf16", "fp8e4nv", normed=False), "bf16 fp8-kv", 128, _NO_FP8)
    for heads, head in ((3, 64), (8, 128), (1, 256)):
        for packed_part in (False, True):
            yield subject(cases.copy_case(heads, head, "i16", packed_part), "2-byte", 128)
            yield subject(cases.copy_case(heads, head, "u8", packed_part), "1-byte", 128)
    for vocab in cases.VOCABULARIES:
        for dtype in ("fp32", "bf16"):
            for case in cases.sampling_cases(vocab, dtype):
                if dtype == "fp32" or "logits" in case.kernel.arg_names:
                    yield subject(case, dtype, 0)
    for case in cases.penalty_cases(cases.VOCABULARIES[-1]):
        yield subject(case, "", 0)


@functools.cache
def _code_digest(function: Callable[..., Any]) -> str:
    """Of a compiled function, the constants that it reads and the functions that it calls. Comments and docstrings do
    not count, nor does what its module does on the host."""
    (node,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(node, ast.FunctionDef)
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    parts = [ast.unparse(node)]
    for name in sorted({part.id for part in ast.walk(node) if isinstance(part, ast.Name)}):
        value = function.__globals__.get(name)
        if inspect.isfunction(called := getattr(value, "fn", None)):
            parts.append(_code_digest(called))
        elif value is not None and hasattr(value, "value"):  # tl.constexpr
            parts.append(f"{name} = {value.value!r}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
