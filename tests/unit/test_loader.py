"""What is read, and that everything else is refused in one line that names it."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from poolwright_engine.checkpoint.loader import LoadError, load_model, stored_dtype
from poolwright_engine.checkpoint.weight_digest import WeightDigest
from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.model.linear import Quantization, quantized
from poolwright_engine.model.llama import KVCache, Linear
from poolwright_engine.native.library import CpuOperations
from support.gguf_writer import write_gguf
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


def test_the_stored_precision_is_what_config_json_says(broken: Path, tmp_path: Path) -> None:
    assert stored_dtype(broken) == "float32"
    for changes, name in (
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"text_config": {"dtype": "int3"}}, "float32"),
    ):
        edit_json(broken / "config.json", **changes)
        assert stored_dtype(broken) == name
    (broken / "config.json").write_text("[]")
    with pytest.raises(LoadError, match=r"config\.json cannot be read"):
        stored_dtype(broken)
    with pytest.raises(LoadError, match="does not exist"):
        stored_dtype(tmp_path / "nowhere")


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
    assert weights.lm_head.memory()[0] == weights.embedding.data_ptr()


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


def test_added_tokens_beyond_the_vocabulary_of_a_text_model_are_left_out(broken: Path) -> None:
    tokenizer = json.loads((broken / "tokenizer.json").read_text())
    image = tokenizer["added_tokens"][0] | {"id": 320, "content": "<image>"}
    fillers = {f"[{index}]": index for index in range(257, 320)}
    tokenizer["model"]["vocab"] |= {"<|end|>": 256, **fillers}
    edit_json(broken / "tokenizer.json", model=tokenizer["model"], added_tokens=[*tokenizer["added_tokens"], image])
    loaded = load_model(broken)
    assert loaded.tokenizer.vocab_size == 320
    assert max(loaded.tokenizer.encode("<image>")) < 320
    assert loaded.tokenizer.eos_ids == {256}


def test_progress_ends_at_the_bytes_of_all_tensors(tiny: Path, tmp_path: Path) -> None:
    for path in (tiny, write_tiny_gguf(tmp_path / "tiny.gguf")):
        seen: list[tuple[int, int]] = []
        load_model(path, progress=lambda done, total, seen=seen: seen.append((done, total)))
        sizes = [4 * tensor.numel() for tensor in random_weights(CONFIG).values()]
        assert seen[0] == (0, sum(sizes))
        assert seen[-1] == (sum(sizes), sum(sizes))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert len(seen) == len(sizes) + 1


def test_whoever_makes_the_products_knows_each_by_name(tiny: Path) -> None:
    made: dict[str, tuple[tuple[int, ...], bool]] = {}

    def make(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        made[name] = (tuple(weight.shape), bias is not None)
        return Linear(weight, bias)

    load_model(tiny, make_linear=make)
    assert len(made) == 4 * 3 + 1
    assert made["model.layers.2.self_attn.qkv_proj"] == ((128, 64), False)
    assert made["model.layers.0.mlp.gate_up_proj"] == ((192, 64), False)
    assert made["lm_head"] == ((320, 64), False)


def corrupt(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_tensor(name: str) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(3)}
        save_file(tensors, folder / "model.safetensors")

    return harm


def without_a_shard(folder: Path) -> None:
    write_tiny_llama(folder, shards=3)
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()


def cut_short(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


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
        (cut_short, "model.safetensors is not a readable safetensors file"),
        (without_a_shard, "model-00002-of-00003.safetensors is missing, which model.safetensors.index.json names"),
        (corrupt("model.safetensors.index.json", "{}"), "model.safetensors.index.json has no weight_map"),
        (with_tensor("model.layers.0.self_attn.q_norm.weight"), "q_norm.weight has no place in architecture Llama"),
        (with_tensor("model.layers.3.input_layernorm.weight"), "layers.3.input_layernorm.weight has no place"),
        (corrupt("model.safetensors", "short"), "model.safetensors is not a readable safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors file"),
        (to_pickle, "pytorch_model.bin is a pickle, which is never read"),
        (to_int8, "tensor model.norm.weight has dtype I8, unsupported"),
    ],
)
def test_a_broken_folder_is_refused(broken: Path, harm: Callable[[Path], object], says: str) -> None:
    harm(broken)
    assert says in refusal(broken)


def test_buffers_that_can_be_derived_and_files_that_the_index_does_not_name_are_passed_over(
    tiny: Path, tmp_path: Path
) -> None:
    write_tiny_llama(tmp_path, shards=3)
    save_file({"layers.0.wq.weight": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq")(
        tiny_copy := Path(shutil.copytree(tiny, tmp_path / "x"))
    )
    torch.testing.assert_close(logits(tmp_path), logits(tiny_copy))


def served_or_refused(path: Path) -> None:
    """No other exception than LoadError, and that in one line that names the path."""
    try:
        load_model(path)
    except LoadError as error:
        message = str(error)
    else:
        message = str(path)
    assert str(path) in message
    assert "\n" not in message


KEYS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "sliding_window", "layer_types"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "eos_token_id", "quantization_config"),
)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**20)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(0, 3) | st.none() | st.text(max_size=3), max_size=3)
    | st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention", "quant_method", ""]), st.integers(0, 9))
)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(KEYS), value=VALUES)
def test_whatever_a_config_says_it_is_served_or_refused_in_one_line(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("model")
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).symlink_to(tiny / file)
    config = json.loads((tiny / "config.json").read_text()) | {name: value}
    (folder / "config.json").write_text(json.dumps(config))
    served_or_refused(folder)


def test_a_lora_adapter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is a LoRA adapter, which is not supported" in refusal(tmp_path)


def test_a_path_that_is_no_model_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == f"model path {tmp_path / 'absent'} does not exist"
    assert refusal(tmp_path) == f"{tmp_path} holds neither config.json nor exactly one .gguf file (0 found)"
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a .gguf file nor a folder" in refusal(tmp_path / "notes.txt")


def test_an_unknown_dtype_is_refused(tiny: Path) -> None:
    assert "dtype 'float8' is not supported" in refusal(tiny, "float8")


# --- GGUF --------------------------------------------------------------------------------------------------------


def write_tiny_gguf(path: Path, tensors: dict[str, Tensor] | None = None, **options: Any) -> Path:
    return write_gguf(path, tensors or random_weights(CONFIG), CONFIG, **options)


def test_a_gguf_file_is_the_same_model_as_the_folder_it_was_made_from(tiny: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(path), logits(tiny), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(tmp_path), logits(tiny), atol=1e-5, rtol=1e-5)  # a folder with one such file


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 0.01), ("BF16", 0.05), ("Q8_0", 0.05), ("Q4_1", 0.6)])
def test_quantized_weights_are_the_same_model_within_their_rounding(
    tiny: Path, tmp_path: Path, kind: str, tolerance: float
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType[kind])
    exact = logits(tiny)
    assert (logits(path) - exact).abs().max() < tolerance * exact.abs().max()


def frequencies(path: Path) -> tuple[float, ...]:
    (kind,) = load_model(path).config.attention_kinds
    return kind.inverse_frequencies


def test_rotary_divisors_of_a_gguf_file_are_llama3_scaling(tmp_path: Path) -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    scaled = write_tiny_llama(tmp_path / "hf", rope_scaling={"rope_type": "llama3", **numbers})
    plain = frequencies(write_tiny_llama(tmp_path / "plain"))
    divisors = [a / b for a, b in zip(plain, frequencies(scaled), strict=True)]
    assert max(divisors) == pytest.approx(8.0)
    assert min(divisors) == pytest.approx(1.0)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", divisors=divisors)
    torch.testing.assert_close(logits(path), logits(scaled), atol=1e-5, rtol=1e-5)


def test_a_gguf_file_without_an_output_tensor_has_tied_embeddings(tmp_path: Path) -> None:
    tensors = random_weights(CONFIG)
    del tensors["lm_head.weight"]
    assert load_model(write_tiny_gguf(tmp_path / "tied.gguf", tensors)).config.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "mamba"}, "architecture mamba (state-space model) is not supported"),
        ({"architecture": "deepseek2"}, "architecture deepseek2 (multi-head latent attention) is not supported"),
        ({"architecture": "qwen3moe"}, "architecture qwen3moe (mixture of experts) is not supported"),
        ({"architecture": "t5"}, "architecture t5 (encoder-decoder model) is not supported"),
        ({"architecture": "gemma4"}, "architecture gemma4 is not supported (supported: Llama, Mistral, Qwen2"),
        ({"metadata": {"general.type": "adapter"}}, "a LoRA adapter or a projector"),
        ({"metadata": {"split.count": 3}}, "one of 3 parts of a model is not supported alone"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count is 8, unlike the head size 16"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling yarn is not supported"),
        ({"metadata": {"llama.attention.sliding_window_pattern": [True]}}, "has 1 entries for 3 layers"),
        (
            {"metadata": {"llama.expert_count": 8}},
            "architecture llama with experts (mixture of experts) is not supported",
        ),
        ({"pre": "chatglm-bpe"}, "pre-tokenizer chatglm-bpe is not supported"),
        ({"tokenizer": "t5"}, "GGUF tokenizer t5 is not supported"),
        ({"tokenizer": "llama"}, "metadata tokenizer.ggml.scores is missing"),
    ],
)
def test_another_gguf_file_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(write_tiny_gguf(tmp_path / "other.gguf", **changes))


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for content in (b"", b"GGUF", b"nonsense" * 100, whole[:100], whole[: len(whole) // 2]):
        damaged.write_bytes(content)
        assert str(damaged) in refusal(damaged)


@settings(max_examples=300, deadline=None)
@given(place=st.floats(0, 1), byte=st.integers(0, 255), length=st.integers(1, 8), half=st.booleans())
def test_whatever_a_gguf_header_says_it_is_served_or_refused_in_one_line(
    gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, place: float, byte: int, length: int, half: bool
) -> None:
    """Bytes of the header, mostly of what comes before and after the vocabulary, changed."""
    path = tmp_path_factory.mktemp("model") / "damaged.gguf"
    header = gguf_bytes.index(b"tokenizer.ggml") if half else len(gguf_bytes) - 3 * 10**5
    at = int(place * header)
    path.write_bytes(gguf_bytes[:at] + bytes([byte]) * length + gguf_bytes[at + length :])
    served_or_refused(path)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf").read_bytes()


def test_a_tensor_of_a_type_that_cannot_be_read_is_named(tmp_path: Path, gguf_bytes: bytes) -> None:
    """The type is the number before the offset that ends the tensor's entry."""
    name = b"blk.1.ffn_norm.weight"
    at = gguf_bytes.index(name) + len(name) + 4 + 8
    for number, says in ((24, "tensor blk.1.ffn_norm.weight has type I8"), (999, "type number 999, which is unknown")):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(gguf_bytes[:at] + number.to_bytes(4, "little") + gguf_bytes[at + 4 :])
        assert says in refusal(path)


def test_a_gguf_file_with_a_tensor_too_many_is_refused(tmp_path: Path) -> None:
    tensors = random_weights(CONFIG) | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}
    assert "tensor blk.1.attn_q.bias has no place" in refusal(write_tiny_gguf(tmp_path / "tiny.gguf", tensors))


def test_a_gguf_file_without_a_tensor_it_needs_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    assert "tensor blk.1.ffn_up.weight is missing" in refusal(path)


# --- one set of weights from another -----------------------------------------------------------------------------


def digest(path: Path, dtype: str = "float32", **options: Any) -> str:
    return load_model(path, dtype, **options).weights_digest


def test_copies_of_weights_have_one_digest_whatever_files_hold_them(tiny: Path, tmp_path: Path) -> None:
    one = digest(tiny)
    assert digest(write_tiny_llama(tmp_path / "shards", shards=3)) == one
    assert digest(write_tiny_gguf(tmp_path / "tiny.gguf")) == one
    assert digest(tiny, make_linear=partial(quantized, Quantization.INT8, CpuOperations.AUTO)) == one
    assert digest(tiny, "bfloat16") != one


def test_a_change_of_any_tensor_changes_the_digest(broken: Path, tmp_path: Path) -> None:
    file = broken / "model.safetensors"
    tensors = load_file(file)
    seen = {digest(broken)}
    for name in tensors:
        save_file(tensors | {name: tensors[name] * 1.001}, file)
        seen.add(digest(broken))
    assert len(seen) == 1 + len(tensors)
    whole, changed = random_weights(CONFIG), random_weights(CONFIG)
    changed["model.layers.2.mlp.down_proj.weight"] *= 1.001
    assert digest(write_tiny_gguf(tmp_path / "a.gguf", whole)) != digest(write_tiny_gguf(tmp_path / "b.gguf", changed))


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (5, 5), (9, 1), (1, 9), (12,)])
def test_no_row_and_of_a_tall_matrix_no_column_is_left_out_of_the_digest(shape: tuple[int, ...]) -> None:
    def of(weight: Tensor) -> str:
        digest = WeightDigest()
        digest.add("weight", weight)
        return digest.hex()

    before = of(torch.zeros(shape))
    assert of(torch.zeros(shape)) == before
    for axis in range(len(shape)) if shape[0] >= shape[-1] else (0,):
        for index in range(shape[axis]):
            changed = torch.zeros(shape)
            changed.select(axis, index).fill_(1)
            assert of(changed) != before, (axis, index)
