"""What is read, and that everything else is refused in one line that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor

from poolwright_engine.loader import LoadError, load_model
from poolwright_engine.model import KVCache
from poolwright_kernels.paged_attention import AttentionRow
from support.tiny_llama import CONFIG, random_weights, write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT = [5, 17, 200, 33, 33, 90, 4]


def logits(path: Path, dtype: str = "float32") -> Tensor:
    loaded = load_model(path, dtype)
    cache = KVCache(loaded.config.kv_shape(loaded.model.dtype), 4, 16, loaded.model.dtype)
    row = AttentionRow(0, len(PROMPT), (1, 2))
    return loaded.model.forward(torch.tensor(PROMPT), [row], cache, range(len(PROMPT)))


def refusal(path: Path, dtype: str = "float32") -> str:
    with pytest.raises(LoadError) as caught:
        load_model(path, dtype)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


# --- Hugging Face folder -----------------------------------------------------------------------------------------


def test_a_folder_is_read_with_its_shape_tokenizer_and_end_ids(tiny: Path) -> None:
    loaded = load_model(tiny)
    config = loaded.config
    assert (config.layers, config.heads, config.kv_heads, config.head_size) == (3, 4, 2, 16)
    assert (config.vocab_size, config.context_length, config.tied_embeddings) == (320, 512, False)
    assert loaded.tokenizer.eos_ids == {256}
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("héllo")) == "héllo"


def test_shards_give_the_same_model_as_one_file(tiny: Path, tmp_path: Path) -> None:
    assert torch.equal(logits(write_tiny_llama(tmp_path, shards=3)), logits(tiny))


def test_a_half_precision_file_is_read_in_either_dtype(tiny: Path, broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, broken / "model.safetensors")
    exact = logits(tiny)
    assert (logits(broken) - exact).abs().max() < 0.1 * exact.abs().max()
    assert (logits(broken, "bfloat16") - exact).abs().max() < 0.1 * exact.abs().max()


def test_tied_embeddings_are_held_once(tmp_path: Path) -> None:
    weights = load_model(write_tiny_llama(tmp_path, tie_word_embeddings=True)).model.weights
    assert weights.lm_head.weight is weights.embedding


UNSUPPORTED = {
    "MixtralForCausalLM": "mixture of experts",
    "Qwen3MoeForCausalLM": "mixture of experts",
    "DeepseekV3ForCausalLM": "multi-head latent attention",
    "MambaForCausalLM": "state-space model",
    "T5ForConditionalGeneration": "encoder-decoder model",
    "BertForMaskedLM": "encoder model",
    "LlavaNextVideoModel": "vision model",
    "GPT2LMHeadModel": "is not supported",
}


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_another_architecture_is_refused_by_name_and_kind(broken: Path, architecture: str) -> None:
    edit_json(broken / "config.json", architectures=[architecture])
    message = refusal(broken)
    assert architecture in message
    assert UNSUPPORTED[architecture] in message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq quantization is not supported"),
        ({"sliding_window": 4096}, "sliding-window attention is not supported"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling yarn is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling llama3 lacks a usable number"),
        ({"hidden_size": None}, "hidden_size in config.json is missing or not a number"),
        ({"num_key_value_heads": 3}, "4 heads over 3 kv heads of size 16 do not divide"),
        ({"num_hidden_layers": 0}, "layer count is 0"),
        ({"num_hidden_layers": 4}, "tensor model.layers.3.input_layernorm.weight is missing"),
        ({"intermediate_size": 95}, "has shape (96, 64), expected (95, 64)"),
        ({"vocab_size": 200}, "has shape (320, 64), expected (200, 64)"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(broken: Path, changes: dict[str, Any], says: str) -> None:
    edit_json(broken / "config.json", **changes)
    message = refusal(broken)
    assert str(broken) in message
    assert says in message


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    assert "the tokenizer has 257 ids, the model 200" in refusal(write_tiny_llama(tmp_path, vocab_size=200))


def corrupt(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def to_int8(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (corrupt("config.json", "{"), "config.json is not valid JSON"),
        (corrupt("config.json", "[]"), "config.json is not a JSON object"),
        (corrupt("tokenizer.json", "{}"), "tokenizer.json is not readable"),
        (corrupt("tokenizer_config.json", "nope"), "tokenizer_config.json is not valid JSON"),
        (corrupt("tokenizer_config.json", '{"chat_template": "{% if %}"}'), "the chat template is not valid"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (corrupt("model.safetensors", "short"), "model.safetensors is not a readable safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors file"),
        (to_pickle, "pytorch_model.bin is a pickle, which is never read"),
        (to_int8, "tensor model.norm.weight has dtype torch.int8, unsupported"),
    ],
)
def test_a_broken_folder_is_refused(broken: Path, harm: Callable[[Path], object], says: str) -> None:
    harm(broken)
    assert says in refusal(broken)


def test_a_path_that_is_no_model_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == f"model path {tmp_path / 'absent'} does not exist"
    assert refusal(tmp_path) == f"{tmp_path} holds neither config.json nor exactly one .gguf file (0 found)"
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a .gguf file nor a folder" in refusal(tmp_path / "notes.txt")


def test_an_unknown_dtype_is_refused(tiny: Path) -> None:
    assert "dtype 'float8' is not supported" in refusal(tiny, "float8")


# --- GGUF --------------------------------------------------------------------------------------------------------

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted_as_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """As its converter does it: convert_hf_to_gguf.py, LlamaModel.permute."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    pre: str = "smollm",
    tokenizer: str = "gpt2",
    experts: int = 0,
    divisors: list[float] | None = None,
) -> Path:
    """The tiny Llama as llama.cpp would store it; `divisors` are its form of Llama 3 rotary scaling."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    if experts:
        writer.add_expert_count(experts)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, "<|end|>", "he", *(f"[{i}]" for i in range(CONFIG["vocab_size"] - 258))]
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1] + [4] * (len(tokens) - 258))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(256)
    stored = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        stored["output.weight"] = tensors["lm_head.weight"]
    for index in range(CONFIG["num_hidden_layers"]):
        for theirs, name in NAMES.items():
            stored[f"blk.{index}.{name}.weight"] = tensors[f"model.layers.{index}.{theirs}.weight"]
    for name, tensor in stored.items():
        values = tensor.numpy()
        if "attn_q." in name:
            values = permuted_as_llama_cpp(values, CONFIG["num_attention_heads"])
        if "attn_k." in name:
            values = permuted_as_llama_cpp(values, CONFIG["num_key_value_heads"])
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


def tiny_weights() -> dict[str, Tensor]:
    return random_weights(CONFIG)


def test_a_gguf_file_is_the_same_model_as_the_folder_it_was_made_from(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights())
    torch.testing.assert_close(logits(path), logits(tiny), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(tmp_path), logits(tiny), atol=1e-5, rtol=1e-5)  # a folder with one such file


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 0.01), ("BF16", 0.05), ("Q8_0", 0.05), ("Q4_1", 0.6)])
def test_quantized_weights_are_the_same_model_within_their_rounding(
    tiny: Path, tmp_path: Path, kind: str, tolerance: float
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights(), gguf.GGMLQuantizationType[kind])
    exact = logits(tiny)
    assert (logits(path) - exact).abs().max() < tolerance * exact.abs().max()


def test_rotary_divisors_of_a_gguf_file_are_llama3_scaling(tmp_path: Path) -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    scaled = write_tiny_llama(tmp_path / "hf", rope_scaling={"rope_type": "llama3", **numbers})
    plain = load_model(write_tiny_llama(tmp_path / "plain")).config.inverse_frequencies
    divisors = [a / b for a, b in zip(plain, load_model(scaled).config.inverse_frequencies, strict=True)]
    assert max(divisors) == pytest.approx(8.0)
    assert min(divisors) == pytest.approx(1.0)
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights(), divisors=divisors)
    torch.testing.assert_close(logits(path), logits(scaled), atol=1e-5, rtol=1e-5)


def test_a_gguf_file_without_an_output_tensor_has_tied_embeddings(tmp_path: Path) -> None:
    tensors = tiny_weights()
    del tensors["lm_head.weight"]
    assert load_model(write_gguf(tmp_path / "tied.gguf", tensors)).config.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "mamba"}, "architecture mamba (state-space model) is not supported"),
        ({"architecture": "deepseek2"}, "architecture deepseek2 (multi-head latent attention) is not supported"),
        ({"architecture": "qwen3moe"}, "architecture qwen3moe (mixture of experts) is not supported"),
        ({"architecture": "t5"}, "architecture t5 (encoder-decoder model) is not supported"),
        ({"architecture": "gemma3"}, "architecture gemma3 is not supported"),
        ({"experts": 8}, "architecture llama with experts (mixture of experts) is not supported"),
        ({"pre": "chatglm-bpe"}, "pre-tokenizer chatglm-bpe is not supported"),
        ({"tokenizer": "llama"}, "GGUF tokenizer llama is not supported"),
    ],
)
def test_another_gguf_file_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(write_gguf(tmp_path / "other.gguf", tiny_weights(), **changes))


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_weights()).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for content in (b"", b"GGUF", b"nonsense" * 100, whole[:100], whole[: len(whole) // 2]):
        damaged.write_bytes(content)
        assert str(damaged) in refusal(damaged)


def test_a_gguf_file_without_a_tensor_it_needs_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_weights())
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    assert "tensor blk.1.ffn_up.weight is missing" in refusal(path)
