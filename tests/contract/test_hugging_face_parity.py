"""Greedy output equals transformers' token for token in float32, however a prompt is cut, batched and paged."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from poolwright_engine.cpu_runner import CpuRunner
from poolwright_engine.loader import LoadedModel, load_model
from poolwright_engine.model import KVCache
from poolwright_engine.runner import Row, Step
from poolwright_engine.sequence import SamplingParams
from poolwright_kernels.paged_attention import AttentionRow
from poolwright_protocol.kv import blocks_for
from support.tiny_llama import write_tiny_llama

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
TIE = 1e-3  # transformers' own two best are closer than rounding differs between batch shapes
CHUNKS = [1, 7, 16, 33, 64, 10_000]


@dataclass(frozen=True)
class Expected:
    """What transformers makes of one prompt: its greedy tokens and the logits of every position of prompt + tokens."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logits: Tensor


def ask_transformers(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[Expected]:
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            asked = torch.tensor([list(prompt)])
            made = model.generate(
                asked,
                attention_mask=torch.ones_like(asked),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
            logits = model(made).logits[0]
            answers.append(Expected(tuple(prompt), tuple(made[0, len(prompt) :].tolist()), logits))
    return answers


def assert_same_tokens(found: Sequence[int], expected: Expected) -> None:
    """Equal, or different only from a point on where transformers' two best tokens tie."""
    for index, (ours, theirs) in enumerate(zip(found, expected.output_ids, strict=True)):
        if ours != theirs:
            best = expected.logits[len(expected.prompt_ids) + index - 1].topk(2).values
            gap = float(best[0] - best[1])
            assert gap < TIE, f"token {index} is {ours}, transformers' is {theirs} by {gap}"
            return


def generate(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], count: int, chunk: int, block_size: int
) -> list[list[int]]:
    """Sequence i starts i steps late, so steps mix chunks and decodes; block tables are interleaved."""
    sizes = [blocks_for(len(prompt) + count, block_size) for prompt in prompts]
    free = list(range(sum(sizes), 0, -1))
    tables: list[list[int]] = [[] for _ in prompts]
    while free:
        for table, size in zip(tables, sizes, strict=True):
            if len(table) < size:
                table.append(free.pop())
    runner = CpuRunner(
        loaded.model, sum(sizes) + 1, block_size, max_num_seqs=len(prompts), cpu_threads=torch.get_num_threads()
    )
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    try:
        number = 0
        while any(len(output) < count for output in outputs):
            rows, owners = [], []
            for slot, prompt in enumerate(prompts):
                if number < slot or len(outputs[slot]) == count:
                    continue
                start = done[slot]
                if start < len(prompt):
                    ids = tuple(prompt[start : start + chunk])
                    last = start + len(ids) == len(prompt)
                    rows.append(Row(slot, start, len(ids), ids, tuple(tables[slot]), last, GREEDY))
                else:
                    rows.append(Row(slot, start, 1, (), tuple(tables[slot]), True, GREEDY, use_last_sampled=True))
                owners.append(slot)
                done[slot] += rows[-1].length
            result = runner.submit(Step(number, tuple(rows))).result()
            for slot, token_ids in zip(owners, result.token_ids, strict=True):
                outputs[slot].extend(token_ids)
            number += 1
    finally:
        runner.close()
    return outputs


def forced_logits(loaded: LoadedModel, expected: Expected, chunk: int, block_size: int) -> Tensor:
    """Logits of every position when prompt and output are fed in chunks."""
    ids = expected.prompt_ids + expected.output_ids
    blocks = tuple(range(blocks_for(len(ids), block_size), 0, -1))
    cache = KVCache(loaded.config.kv_shape(loaded.model.dtype), len(blocks) + 1, block_size, loaded.model.dtype)
    parts = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        row = AttentionRow(start, len(part), blocks)
        parts.append(loaded.model.forward(torch.tensor(part), [row], cache, range(len(part))))
    return torch.cat(parts)


# --- tiny checkpoints --------------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-head-per-kv-head": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "llama3-scaling": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
    "llama3-scaling-in-rope-parameters": {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}},
    "linear-scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "three-shards": {"shards": 3},
}
TINY_PROMPTS = [
    [(7 * i * i + 3 * i) % 256 for i in range(90)],
    [11, 200, 3],
    [(91 * i + 5) % 256 for i in range(40)],
    [42],
]
TINY_TOKENS = 16


@pytest.fixture(scope="module", params=CHECKPOINTS)
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_torch_thread: None
) -> tuple[LoadedModel, list[Expected]]:
    from transformers import AutoModelForCausalLM

    folder = write_tiny_llama(tmp_path_factory.mktemp(request.param), **CHECKPOINTS[request.param])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return load_model(folder), ask_transformers(theirs, TINY_PROMPTS, TINY_TOKENS)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_of_a_checkpoint_are_transformers(tiny: tuple[LoadedModel, list[Expected]], chunk: int) -> None:
    loaded, answers = tiny
    for expected in answers:
        found = forced_logits(loaded, expected, chunk, block_size=16)
        assert (found - expected.logits).abs().max() < TIE


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (7, 4), (16, 16), (33, 1), (64, 32), (10_000, 8)])
def test_a_checkpoint_gives_transformers_tokens(
    tiny: tuple[LoadedModel, list[Expected]], chunk: int, block_size: int
) -> None:
    loaded, answers = tiny
    outputs = generate(loaded, [expected.prompt_ids for expected in answers], TINY_TOKENS, chunk, block_size)
    for found, expected in zip(outputs, answers, strict=True):
        assert_same_tokens(found, expected)


# --- the real model ----------------------------------------------------------------------------------------------

REAL_PROMPTS = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a bottle with a letter in it. " * 4,
    "def fibonacci(n):",
]
REAL_TOKENS = 24


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[LoadedModel, list[Expected]]:
    """Loaded by both; transformers' copy is gone once it has answered."""
    from transformers import AutoModelForCausalLM

    loaded = load_model(smollm2_path)
    prompts = [
        loaded.tokenizer.encode(loaded.tokenizer.render_chat([{"role": "user", "content": text}]), False)
        for text in REAL_PROMPTS
    ]
    with pytest.MonkeyPatch.context() as patch:
        # transformers makes the same map once per module and reads the file twice: most of the time it takes to load.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        theirs = AutoModelForCausalLM.from_pretrained(
            str(smollm2_path.parent), gguf_file=smollm2_path.name, dtype=torch.float32
        ).eval()
    return loaded, ask_transformers(theirs, prompts, REAL_TOKENS)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_of_the_real_model_are_transformers(smollm2: tuple[LoadedModel, list[Expected]], chunk: int) -> None:
    loaded, answers = smollm2
    expected = answers[0] if chunk < 16 else answers[1]
    found = forced_logits(loaded, expected, chunk, block_size=16)
    assert (found - expected.logits).abs().max() < TIE


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("chunk", "block_size"), [(7, 32), (64, 16), (10_000, 4)])
def test_the_real_model_gives_transformers_tokens(
    smollm2: tuple[LoadedModel, list[Expected]], chunk: int, block_size: int
) -> None:
    loaded, answers = smollm2
    outputs = generate(loaded, [expected.prompt_ids for expected in answers], REAL_TOKENS, chunk, block_size)
    for found, expected in zip(outputs, answers, strict=True):
        assert_same_tokens(found, expected)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_bfloat16_of_the_real_model_is_near_float32(
    smollm2: tuple[LoadedModel, list[Expected]], smollm2_path: Path
) -> None:
    _, answers = smollm2
    found = forced_logits(load_model(smollm2_path, "bfloat16"), answers[1], 64, block_size=16)
    assert (found - answers[1].logits).abs().mean() < 0.3
    agreed = (found.argmax(1) == answers[1].logits.argmax(1)).float().mean()
    assert agreed > 0.9
