"""Tiny checkpoints as llama.cpp's converter would store them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from torch import Tensor

F32 = gguf.GGMLQuantizationType.F32

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    kind: gguf.GGMLQuantizationType = F32,
    architecture: str = "llama",
    pre: str = "smollm",
    tokenizer: str = "gpt2",
    metadata: Mapping[str, int | float | str | bool | list[bool]] | None = None,
    divisors: list[float] | None = None,
) -> Path:
    """`tensors` and `config` as Hugging Face has them; matrices are stored as `kind`. `divisors` are llama.cpp's form
    of Llama 3 rotary scaling. `metadata` comes on top."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "rope_theta" in config:
        writer.add_rope_freq_base(config["rope_theta"])
    for name, value in (metadata or {}).items():
        _add(writer, name, value)
    _add_vocabulary(writer, config["vocab_size"], pre, tokenizer)
    for name, values in _stored(tensors, config, architecture).items():
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: int | float | str | bool | list[bool]) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    else:
        writer.add_float32(name, value)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int, pre: str, tokenizer: str) -> None:
    """256 bytes, an end, one merge, and fillers."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, "<|end|>", "he", *(f"[{i}]" for i in range(size - 258))]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1] + [4] * (len(tokens) - 258))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(256)


def _stored(tensors: Mapping[str, Tensor], config: Mapping[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """convert_hf_to_gguf.py: LlamaModel.permute, Gemma2Model.modify_tensors, Gemma3Model.modify_tensors."""
    names = _GEMMA_NAMES if architecture.startswith("gemma") else _NAMES
    interleaved = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stored = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        part, _, kind = name.rpartition(".")
        if architecture.startswith("gemma") and "norm" in part:
            values = values + 1
        heads = interleaved.get(part.rpartition(".")[2]) if architecture == "llama" else None
        if heads is not None:
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if part.startswith("model.layers."):
            _, _, index, part = part.split(".", 3)
            stored[f"blk.{index}.{names[part]}.{kind}"] = values
        else:
            stored[f"{names[part]}.{kind}"] = values
    return stored
