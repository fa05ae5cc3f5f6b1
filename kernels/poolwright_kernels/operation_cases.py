"""What every operation but attention is compiled to, ahead of time: the launches that serving makes, of typical models.

Constants come from the same functions as at a launch, so that what is looked at is what runs.
"""

from collections.abc import Iterator

import torch

from poolwright_kernels import block_copy, gated_unit, penalties, rms_norm, rotary_write, sampling
from poolwright_kernels.ahead_of_time import AheadOfTimeCase, case_of
from poolwright_kernels.jit import ceil_div, power_of_two_from

HIDDEN_SIZES = (576, 4096, 5120)  # SmolLM2 135M, Llama 3 8B, Qwen 3 14B
MLP_WIDTHS = (1536, 14336)
VOCABULARIES = (49152, 128256)

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}


def norm_case(hidden: int, dtype: str, add: bool, plus_one: bool) -> AheadOfTimeCase:
    block = power_of_two_from(hidden)
    tensor = "*" + dtype
    types = {"x": tensor, "residual": tensor, "weight": tensor, "y": tensor, "epsilon": "fp32"}
    types |= dict.fromkeys(("x_stride", "residual_stride", "y_stride"), "i32")
    constants = {"HIDDEN": hidden, "BLOCK": block, "ADD": add, "PLUS_ONE": plus_one}
    label = f"{hidden}{' add' if add else ''}{' 1+w' if plus_one else ''}"
    return case_of(label, rms_norm.rms_norm_kernel, types, constants, rms_norm.warps_for(block))


def gated_case(width: int, dtype: str, gelu: bool) -> AheadOfTimeCase:
    types = {"gate_up": "*" + dtype, "y": "*" + dtype, "gate_up_stride": "i32", "y_stride": "i32"}
    constants = {"WIDTH": width, "BLOCK": gated_unit.BLOCK, "GELU": gelu}
    return case_of(f"{width} {'gelu' if gelu else 'silu'}", gated_unit.gated_unit_kernel, types, constants, 4)


def rotary_case(head_size: int, group: int, dtype: str, kv_dtype: str, normed: bool) -> AheadOfTimeCase:
    """With 8 kv heads and pages of 16."""
    kernel = rotary_write.rotary_write_kernel
    options = rotary_write.launch_options(8 * group, 8, head_size, head_size, 16, _TORCH[kv_dtype])
    warps = options.pop("num_warps")
    constants = options | {"PLUS_ONE": False}
    if not normed:
        constants |= {"query_norm": None, "key_norm": None}
    if kv_dtype != "fp8e4nv":
        constants |= {"key_scale": None, "value_scale": None}
    pointers = {"key_cache": kv_dtype, "value_cache": kv_dtype, "positions": "i64", "slots": "i64"}
    pointers |= dict.fromkeys(("cos_sin", "key_scale", "value_scale"), "fp32")
    types = {}
    for name in kernel.arg_names:
        if name not in constants:
            types[name] = "i32" if name.endswith("_stride") else "*" + pointers.get(name, dtype)
    types["epsilon"] = "fp32"
    return case_of(f"{head_size}×{group}{' norm' if normed else ''}", kernel, types, constants, warps)


def copy_case(heads: int, head_size: int, dtype: str, packed: bool) -> AheadOfTimeCase:
    """Of blocks of 16: within a cache, or `packed` into a hand-off."""
    kernel = block_copy.copy_blocks_kernel
    types = {"source": "*" + dtype, "target": "*" + dtype, "source_ids": "*i64", "layers": "i32"}
    types |= {name: "i32" for name in kernel.arg_names if name.endswith("_stride")}
    types |= {name: "i64" for name in types if name.endswith(("half_stride", "layer_stride"))}
    constants: dict[str, int | None] = dict(block_copy.launch_options(16, heads * head_size))
    warps = constants.pop("num_warps")
    assert warps is not None
    if packed:
        constants["target_ids"] = None
    else:
        types["target_ids"] = "*i64"
    label = f"{heads}×{head_size}{' packed' if packed else ''}"
    return case_of(label, kernel, types, constants, warps, odd={"layers"})


def sampling_cases(vocab: int, dtype: str) -> Iterator[AheadOfTimeCase]:
    row = dict.fromkeys(("temperature", "top_p", "min_p", "thresholds"), "*fp32")
    row |= {"logits": "*" + dtype, "top_k": "*i32", "row_stride": "i32"}
    constants = {"VOCAB": vocab, "BLOCK": sampling.SEARCH_BLOCK}
    yield case_of(f"{vocab}", sampling.threshold_kernel, row, constants, sampling.SEARCH_WARPS)
    parts = ceil_div(vocab, sampling.DRAW_BLOCK)
    draw = {"logits": "*" + dtype, "temperature": "*fp32", "thresholds": "*fp32", "seeds": "*i64", "positions": "*i64"}
    draw |= {"best": "*fp32", "best_ids": "*i32", "row_stride": "i32"}
    constants = {"VOCAB": vocab, "PARTS": parts, "BLOCK": sampling.DRAW_BLOCK}
    yield case_of(f"{vocab}", sampling.draw_kernel, draw, constants, 4)
    pick = {"best": "*fp32", "best_ids": "*i32", "token_ids": "*i64"}
    constants = {"PARTS": parts, "BLOCK": power_of_two_from(parts)}
    yield case_of(f"{vocab}", sampling.pick_kernel, pick, constants, 1)


def penalty_cases(vocab: int) -> Iterator[AheadOfTimeCase]:
    state = {"prompt_bits": "*i32", "output_counts": "*i32", "bits_stride": "i32", "counts_stride": "i32"}
    block = {"BLOCK": penalties.BLOCK}
    logits = {"logits": "*fp32", "logits_stride": "i32"}
    rates = dict.fromkeys(("repetition", "presence", "frequency"), "*fp32")
    types = logits | state | rates | {"seats": "*i64"}
    yield case_of(f"{vocab}", penalties.penalize_kernel, types, block | {"VOCAB": vocab}, 4)
    types = logits | {"allowed_bits": "*i32", "bits_stride": "i32"}
    yield case_of(f"{vocab}", penalties.mask_logits_kernel, types, block | {"VOCAB": vocab}, 4)
    types = logits | {"rows": "*i64", "token_ids": "*i64", "values": "*fp32", "pairs": "i32"}
    yield case_of("", penalties.bias_logits_kernel, types, block, 4, odd={"pairs"})
    types = state | {"seats": "*i64", "token_ids": "*i64", "tokens": "i32"}
    for prompt in (True, False):
        label = "prompt" if prompt else "output"
        yield case_of(label, penalties.remember_tokens_kernel, types, block | {"PROMPT": prompt}, 4, odd={"tokens"})
