"""What hybrid attention is compiled to for a machine that need not be present: the launches that serving would make.

For `poolwright_kernels.inspect`, and for filling a cache of compiled kernels before the first request.
"""

from collections.abc import Iterator
from typing import Any

from poolwright_kernels.ahead_of_time import AheadOfTimeCase, case_of
from poolwright_kernels.attention_tiles import tiles_for
from poolwright_kernels.decode_plan import decode_plan_kernel, plan_options
from poolwright_kernels.hybrid_attention import (
    attention_options,
    hybrid_attention_kernel,
    merge_kernel,
    merge_options,
)

_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8e4nv": 1}
_NOT_SPECIALIZED = frozenset(
    {
        *("window", "table_stride", "sequences", "lanes", "slot_tokens", "heads", "kv_heads"),
        *("group", "group_reciprocal", "page_bits", "page_mask"),
    }
)


def ahead_of_time_cases(
    head_size: int,
    group: int,
    capability: int,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    window: bool = False,
    soft_cap: bool = False,
) -> Iterator[AheadOfTimeCase]:
    """The launch with chunks ("mixed"), that of decodes only ("decode"), the merge and the plan of decodes, for one
    model on one target.

    capability: 80, 90, 100, 120. dtype, kv_dtype: Triton's names; kv_dtype "fp8e4nv" needs capability 89 or more.
    """
    kv_dtype = kv_dtype or dtype
    pointers = {"query": dtype, "output": dtype, "key_cache": kv_dtype, "value_cache": kv_dtype}
    pointers |= dict.fromkeys(("partial_output", "partial_lse", "key_scale", "value_scale"), "fp32")
    scales = {} if kv_dtype == "fp8e4nv" else {"key_scale": None, "value_scale": None}
    for label, has_chunks in (("mixed", True), ("decode", False)):
        tiles = tiles_for(
            head_size, group, has_chunks, _ELEMENT_BYTES[dtype], capability, cache_bytes=_ELEMENT_BYTES[kv_dtype]
        )
        options = attention_options(head_size, tiles.launch, has_chunks, window, soft_cap)
        yield _case(label, hybrid_attention_kernel, pointers, options | scales)
    yield _case("merge", merge_kernel, pointers, merge_options(head_size))
    yield _case("plan", decode_plan_kernel, pointers, plan_options(1, tiles.small_keys, 1024))


def _case(label: str, kernel: Any, pointers: dict[str, str], options: dict[str, Any]) -> AheadOfTimeCase:
    names = ("num_warps", "maxnreg", "ptx_options")
    launch: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    types = {}
    for name in kernel.arg_names:
        if name in ("score_scale", "soft_cap"):
            types[name] = "fp32"
        elif name not in options:
            whole = name.endswith("_stride") or name in _NOT_SPECIALIZED
            types[name] = "i32" if whole else "*" + pointers.get(name, "i32")
    case = case_of(label, kernel, types, options, launch["num_warps"], _NOT_SPECIALIZED)
    case.options.update(launch)
    return case
