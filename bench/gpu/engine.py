"""Greedy tokens of the runner against transformers on the same seeded weights, with and without graphs, in float32.

Where transformers is not installed, the engine's own forward pass in plain PyTorch on the CPU stands for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from bench.gpu.harness import Bench
from bench.gpu.models import BLOCK_SIZE, greedy, llama_config, random_weights, runner_of

from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.cuda.graphs import NO_GRAPHS, graph_sizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.model.linear import Linear
from poolwright_engine.model.llama import LayerWeights, LlamaModel, Weights
from poolwright_engine.model.model_config import ModelConfig

_TIE = 1e-3  # a difference between two logits that rounding may turn over


def run(bench: Bench) -> str:
    config = llama_config(True) if bench.tiny else llama_config(
        False, vocab_size=8000, hidden_size=1024, intermediate_size=2816, heads=16, kv_heads=4, head_size=64, layers=8
    )  # fmt: skip
    weights = random_weights(config, torch.float32, bench.device)
    count = 6 if bench.tiny else 48
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 5, 33) if bench.tiny else (1, 15, 16, 17, 100, 255, 256, 257, 700)
    prompts = [tuple(torch.randint(config.vocab_size, (n,), generator=generator).tolist()) for n in lengths]
    model = CudaModel(config, weights, 1024, bench.device)
    oracle, logits_of = _oracle(config, weights)
    truth = oracle(prompts, count)
    name = oracle.__name__
    for label, sizes in (("eager", NO_GRAPHS), ("graphs", graph_sizes(len(prompts), 512))):
        runner = runner_of(model, len(prompts), 512, 1024, 64 * len(prompts), sizes)
        found = greedy(runner, prompts, count, chunk=96)
        runner.close()
        same = sum(a == b for a, b in zip(found, truth, strict=True))
        ties = [
            _is_tie(logits_of, prompt, ours, theirs)
            for prompt, ours, theirs in zip(prompts, found, truth, strict=True)
            if ours != theirs
        ]
        bench.check(f"{label} against {name}", all(ties), same=same, of=len(prompts), parted_at_ties=len(ties))
    return f"{len(prompts)} prompts, {count} tokens each, as {name} has them, eager and in graphs"


def _oracle(config: ModelConfig, weights: Weights) -> tuple[Any, Any]:
    """Something that answers prompts, by name, and the logits after some ids."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return _plain(config, weights)
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        rms_norm_eps=config.rms_norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    device = weights.embedding.device
    with torch.device(device):
        model = LlamaForCausalLM(settings).eval()
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    state["lm_head.weight"] = weights.lm_head.weight
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}"
        parts = layer.qkv.weight.split((queries, keys, keys))
        for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True):
            state[f"{at}.self_attn.{name}.weight"] = part
        state[f"{at}.self_attn.o_proj.weight"] = layer.output.weight
        gate, up = layer.gate_up.weight.chunk(2)
        state |= {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up}
        state[f"{at}.mlp.down_proj.weight"] = layer.down.weight
        state[f"{at}.input_layernorm.weight"] = layer.attention_norm
        state[f"{at}.post_attention_layernorm.weight"] = layer.mlp_norm
    model.load_state_dict(state)

    def transformers(prompts: Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            with torch.inference_mode():
                found = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                )
            outputs.append(found[0, len(prompt) :].tolist())
        return outputs

    def logits_of(ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([list(ids)], device=device)).logits[0, -1].float().cpu()

    return transformers, logits_of


def _plain(config: ModelConfig, weights: Weights) -> tuple[Any, Any]:
    def moved(linear: Linear) -> Linear:
        return Linear(linear.weight.cpu())

    on_cpu = Weights(
        weights.embedding.cpu(),
        tuple(
            LayerWeights(
                layer.attention_norm.cpu(), moved(layer.qkv), moved(layer.output), layer.mlp_norm.cpu(),
                moved(layer.gate_up), moved(layer.down),
            )
            for layer in weights.layers
        ),
        weights.norm.cpu(),
        moved(weights.lm_head),
    )  # fmt: skip

    def plain_pytorch(prompts: Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
        pages = -(-(max(map(len, prompts)) + count) // BLOCK_SIZE)
        runner = CpuRunner(LlamaModel(config, on_cpu), 1 + pages * len(prompts), BLOCK_SIZE, len(prompts))
        try:
            return greedy(runner, prompts, count, chunk=96)
        finally:
            runner.close()

    def logits_of(ids: Sequence[int]) -> torch.Tensor:
        from poolwright_engine.model.cpu_attention import AttentionRow
        from poolwright_engine.model.llama import KVCache

        pages = -(-len(ids) // BLOCK_SIZE)
        cache = KVCache(config.kv_shape(torch.float32), 1 + pages, BLOCK_SIZE, torch.float32)
        rows = [AttentionRow(0, len(ids), tuple(range(1, 1 + pages)))]
        return LlamaModel(config, on_cpu).forward(torch.tensor(ids), rows, cache, [len(ids) - 1])[0]

    return plain_pytorch, logits_of


def _is_tie(logits_of: Any, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """They part where the two best logits are as good as equal."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return False
    logits = logits_of((*prompt, *theirs[:at]))
    return bool((logits[theirs[at]] - logits[ours[at]]).abs() < _TIE)
