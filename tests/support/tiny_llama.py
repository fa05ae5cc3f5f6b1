"""A tiny random Llama on disk, as Hugging Face stores one: loads in milliseconds, for tests of everything but words."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 256,
}


def write_tiny_llama(folder: Path, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
    """Writes config.json, safetensors and a byte-level tokenizer.json; `changes` go over CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(random_weights(config, seed).items())
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(dict(tensors[shard::shards]), folder / name, metadata={"format": "pt"})
    if shards > 1:
        places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, (name, _) in enumerate(tensors)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    write_byte_tokenizer(folder)
    return folder


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """By Hugging Face names, large enough that greedy choices are not ties."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    queries, keys = heads * config["head_dim"], kv_heads * config["head_dim"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        linears = {
            "self_attn.q_proj": (queries, hidden, config["attention_bias"]),
            "self_attn.k_proj": (keys, hidden, config["attention_bias"]),
            "self_attn.v_proj": (keys, hidden, config["attention_bias"]),
            "self_attn.o_proj": (hidden, queries, config["attention_bias"]),
            "mlp.gate_proj": (inner, hidden, config["mlp_bias"]),
            "mlp.up_proj": (inner, hidden, config["mlp_bias"]),
            "mlp.down_proj": (hidden, inner, config["mlp_bias"]),
        }
        for name, (rows, columns, has_bias) in linears.items():
            tensors[f"{at}.{name}.weight"] = matrix(rows, columns)
            if has_bias:
                tensors[f"{at}.{name}.bias"] = torch.randn(rows, generator=generator)
        tensors[f"{at}.input_layernorm.weight"] = norm()
        tensors[f"{at}.post_attention_layernorm.weight"] = norm()
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    return tensors


def write_byte_tokenizer(folder: Path) -> None:
    """256 ids for the 256 bytes, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
