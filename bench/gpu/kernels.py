"""Each kernel in the precisions that serve against its reference in float64, at the edges of lengths and pages."""

import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch
from bench.gpu.harness import Bench, largest, relative_error
from bench.gpu.paged import PagedBatch, paged_batch
from torch import Tensor

from poolwright_kernels import block_copy, gated_unit, penalties, rms_norm, rotary_write, sampling
from poolwright_kernels.attention_plan import AttentionShape
from poolwright_kernels.attention_reference import hybrid_attention_reference
from poolwright_kernels.hybrid_attention import hybrid_attention

# Of the largest number: a few units in the last place of what is rounded on the way.
BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

LENS = [(1, 1), (17, 17), (1, 255), (129, 400), (1, 257), (64, 64), (3, 50), (1, 2049)]
PROCESSES = 6  # compiling takes most of the time, and a core each


def run(bench: Bench) -> str:
    worst: dict[str, float] = {}
    _exact(bench)
    for dtype in BOUNDS:
        for name, check in PLAIN.items():
            _told(bench, worst, name, dtype, check(bench, dtype))
    for case, found in _attention(bench):
        _told(bench, worst, case.name, case.dtype, found)
    name, error = max(worst.items(), key=lambda item: item[1])
    return f"{len(worst)} kernels in up to {len(BOUNDS)} precisions right; largest error {error:.1e}, {name}"


def _told(bench: Bench, worst: dict[str, float], name: str, dtype: torch.dtype, error: float | str) -> None:
    """error: the largest, or why there is none."""
    is_right = not isinstance(error, str) and error < BOUNDS[dtype]
    bench.check(f"{name} {dtype}", is_right, error=error, bound=BOUNDS[dtype])
    if not isinstance(error, str):
        worst[name] = max(worst.get(name, 0.0), error)


def _norm(bench: Bench, dtype: torch.dtype) -> float:
    x, residual = (torch.randn(37, 4096, dtype=dtype, device=bench.device) for _ in range(2))
    weight = torch.randn(4096, dtype=dtype, device=bench.device)
    truth_residual = residual.double()
    truth = rms_norm.add_rms_norm_reference(x.double(), truth_residual, weight.double(), 1e-5)
    found = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    alone = rms_norm.rms_norm(x, weight, 1e-5)
    truth_alone = rms_norm.rms_norm_reference(x.double(), weight.double(), 1e-5)
    pairs = ((found, truth), (residual, truth_residual), (alone, truth_alone))
    return largest(relative_error(a, b) for a, b in pairs)


def _gated(bench: Bench, dtype: torch.dtype) -> float:
    x = torch.randn(37, 2 * 1536, dtype=dtype, device=bench.device)
    silu = relative_error(gated_unit.silu_mul(x), gated_unit.silu_mul_reference(x.double()))
    return largest((silu, relative_error(gated_unit.gelu_mul(x), gated_unit.gelu_mul_reference(x.double()))))


def _rotary(bench: Bench, dtype: torch.dtype) -> float:
    def made(kind: torch.dtype) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        qkv = torch.randn(19, 48, 128, generator=generator).to(dtype)
        angles = torch.randn(64, 64, generator=generator)
        caches = [torch.zeros(8, 16, 8, 128, dtype=dtype).to(bench.device, kind) for _ in range(2)]
        slots = torch.randperm(120, generator=generator)[:19] + 1
        slots[3] = -1
        norms = [torch.randn(128, generator=generator).to(dtype).to(bench.device, kind) for _ in range(2)]
        query, key, value = qkv.to(bench.device, kind).split((32, 8, 8), dim=1)
        table = torch.cat((angles.cos(), angles.sin()), 1).to(bench.device)
        positions = torch.randint(64, (19,), generator=generator).to(bench.device)
        return [query, key, value, table, positions, slots.to(bench.device), *caches, *norms]

    ours, truth = made(dtype), made(torch.float64)
    found, expected = rotary_write.rotary_write(*ours), rotary_write.rotary_write_reference(*truth)
    return largest(relative_error(a, b) for a, b in ((found, expected), (ours[6], truth[6]), (ours[7], truth[7])))


PLAIN: dict[str, Callable[[Bench, torch.dtype], float]] = {"norms": _norm, "gated": _gated, "rotary_write": _rotary}


@dataclass(frozen=True)
class AttentionCase:
    """What is compiled for one model: mixed steps and decodes."""

    device: str
    dtype: torch.dtype
    shape: AttentionShape
    kv_dtype: torch.dtype | None = None
    window: int = 0
    cap: float = 0.0

    @property
    def name(self) -> str:
        parts = [f"attention {self.shape.head_size}×{self.shape.group}"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"cap {self.cap:g}"] if self.cap else []
        return " ".join([*parts, "fp8 KV"] if self.kv_dtype else parts)

    def error(self) -> float | str:
        """The largest; or what went wrong, so that it takes nothing from the others."""
        torch.manual_seed(0)
        try:
            return largest(self._error(lens) for lens in (LENS, [pair for pair in LENS if pair[0] == 1]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:1000]

    def _error(self, lens: Sequence[tuple[int, int]]) -> float:
        device = torch.device(self.device)
        batch = paged_batch(self.shape, lens, device, self.dtype, self.kv_dtype)
        scales = [torch.tensor([x], device=device) for x in (0.5, 2.0)] if self.kv_dtype else [None, None]
        plan = batch.plan(not batch.is_decode)
        ours = hybrid_attention(
            batch.query, batch.key_cache, batch.value_cache, plan, batch.scale, self.window, self.cap, None, *scales
        )
        return relative_error(ours, _truth(batch, self.window, self.cap, scales))


def _cases(bench: Bench) -> list[AttentionCase]:
    """In the precision that serves all head sizes, first; in the others the usual one."""
    case = functools.partial(AttentionCase, bench.device.type)
    usual = AttentionShape(8, 1, 128, 16) if bench.tiny else AttentionShape(32, 8, 128, 16)
    others = [(3, 1, 64)] if bench.tiny else [(9, 3, 64), (8, 2, 96), (8, 2, 256), (64, 2, 128)]
    bf16 = torch.bfloat16
    cases = [case(bf16, usual), *(case(bf16, AttentionShape(*sizes, 16)) for sizes in others)]
    cases += [case(bf16, usual, window=100), case(bf16, usual, cap=30.0), case(bf16, usual, window=100, cap=30.0)]
    if not bench.is_cuda or torch.cuda.get_device_capability() >= (8, 9):
        cases.append(case(bf16, usual, torch.float8_e4m3fn))
    return [*cases, case(torch.float16, usual), case(torch.float32, usual)]


def _attention(bench: Bench) -> Iterator[tuple[AttentionCase, float | str]]:
    """As they are found."""
    cases = _cases(bench)
    if not bench.is_cuda:
        yield from ((case, case.error()) for case in cases)
        return
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(case.error): case for case in cases}
        for done in as_completed(running):
            yield running[done], done.result()


def _truth(batch: PagedBatch, window: int, cap: float, scales: list[Any]) -> Tensor:
    """In float64, or in float32 of an 8-bit cache."""
    is_narrow = batch.key_cache.dtype.itemsize == 1
    wide = torch.float32 if is_narrow else torch.float64
    keys, values = (cache if is_narrow else cache.to(wide) for cache in (batch.key_cache, batch.value_cache))
    plan, query = batch.plan(not batch.is_decode), batch.query.to(wide)
    output = torch.zeros_like(query)
    hybrid_attention_reference(
        query, keys, values, output, plan.query_starts, plan.context_lens, plan.block_tables, plan.lane_ranges,
        plan.counts, plan.large_items, plan.small_items, plan.merges, plan.partial_output, plan.partial_lse,
        plan.layout.tiles.launch, plan.layout.has_chunks, batch.scale, window, cap, scales[0], scales[1],
    )  # fmt: skip
    return output


def _exact(bench: Bench) -> None:
    """What must be equal to the bit: tokens drawn, bits counted, blocks moved."""
    device, vocab, rows = bench.device, 1000 if bench.tiny else 128_256, 8
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    columns = (
        torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 1.0, 0.5, 2.0]),
        torch.tensor([0, 0, 40, 0, 5, 0, 100, 1], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 0.95, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.0]),
        torch.arange(rows) * 2**40 + 7,
        torch.arange(rows) * 11,
    )
    truth = sampling.sample_tokens_reference(logits, *columns)
    found = sampling.sample_tokens(logits.to(device), *(column.to(device) for column in columns)).cpu()
    bench.check("sample_tokens", bool((truth == found).all()), found=found.tolist(), truth=truth.tolist())

    seats = torch.tensor([1, 1, 0, -1, 2, 1])
    ids = torch.tensor([5, 5, 31, 3, 32, 999])
    states = [
        [torch.zeros(3, -(-vocab // 32), dtype=torch.int32), torch.zeros(3, vocab, dtype=torch.int32)] for _ in "ab"
    ]
    states[1] = [state.to(device) for state in states[1]]
    own = logits[:3].clone().to(device)
    expected = logits[:3].clone()
    rates = [torch.tensor([1.3, 1.0, 0.8]), torch.tensor([0.5, 0.0, 1.0]), torch.tensor([0.0, 0.3, 0.1])]
    for is_prompt in (True, False):
        penalties.remember_tokens_reference(seats, ids, is_prompt, *states[0])
        penalties.remember_tokens(seats.to(device), ids.to(device), is_prompt, *states[1])
    penalties.penalize_reference(expected, torch.arange(3), *states[0], *rates)
    penalties.penalize(own, torch.arange(3).to(device), *states[1], *(rate.to(device) for rate in rates))
    same = all(bool((a == b.cpu()).all()) for a, b in zip(*states, strict=True))
    bench.check("remember_tokens", same)
    bench.check("penalize", relative_error(own, expected) < 1e-6)
    pairs = (torch.tensor([0, 2, -1]), torch.tensor([7, 8, 9]), torch.tensor([1.5, -torch.inf, 3.0]))
    penalties.bias_logits_reference(expected, *pairs)
    penalties.bias_logits(own, *(part.to(device) for part in pairs))
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator).int()
    penalties.mask_logits_reference(expected, bits)
    penalties.mask_logits(own, bits.to(device))
    same = bool((own.cpu().isinf() == expected.isinf()).all()) and bool(own.cpu()[0, 7] == expected[0, 7])
    bench.check("bias_logits and mask_logits", same)

    cache = torch.randn(2, 3, 9, 16, 4, 64, generator=generator).to(torch.bfloat16)
    on_device = cache.to(device)
    host = torch.zeros(2, 3, 5, 16, 4, 64, dtype=torch.bfloat16, pin_memory=bench.is_cuda)
    ids, host_ids = torch.tensor([3, 8]).to(device), torch.tensor([4, 0]).to(device)
    block_copy.copy_blocks(on_device, host, ids, host_ids)
    bench.synchronize()
    bench.check("copy_blocks out", bool((host[:, :, [4, 0]] == cache[:, :, [3, 8]]).all()))
    block_copy.copy_blocks(host, on_device, host_ids, torch.tensor([1, 2]).to(device))
    bench.check("copy_blocks in", bool((on_device[:, :, [1, 2]].cpu() == cache[:, :, [3, 8]]).all()))
    packed = block_copy.gather_blocks(on_device, ids, 1, 2, 1, 3)
    bench.check("gather_blocks", bool((packed.cpu() == cache[:, 1:, [3, 8], :, 1:]).all()))
    block_copy.scatter_blocks(packed, on_device, torch.tensor([5, 6]).to(device), 1, 1)
    bench.check("scatter_blocks", bool((on_device[:, 1:, [5, 6], :, 1:].cpu() == cache[:, 1:, [3, 8], :, 1:]).all()))
