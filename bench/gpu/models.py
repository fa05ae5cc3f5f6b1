"""Models of seeded random weights, made on the device, and the steps that drive a runner over them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poolwright_engine.cuda.graphs import NO_GRAPHS, GraphSizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.cuda.runner import CudaRunner
from poolwright_engine.model.linear import Linear
from poolwright_engine.model.llama import LayerWeights, Weights
from poolwright_engine.model.model_config import AttentionKind, ModelConfig
from poolwright_engine.scheduling.runner import ModelRunner, Row, Step
from poolwright_engine.scheduling.sequence import SamplingParams

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def llama_config(tiny: bool, **changes: Any) -> ModelConfig:
    """Llama 3.1 8B's shape, with plain rotary frequencies; or a tiny one."""
    sizes: dict[str, Any] = {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "heads": 32, "kv_heads": 8,
        "head_size": 128, "layers": 32,
    }  # fmt: skip
    if tiny:
        sizes |= {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "heads": 4, "kv_heads": 2}
        sizes |= {"head_size": 16, "layers": 2}
    sizes |= changes
    layers, head_size = sizes.pop("layers"), sizes["head_size"]
    frequencies = 500_000.0 ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        context_length=131_072,
        rms_norm_epsilon=1e-5,
        attention_kinds=(AttentionKind(tuple(frequencies.tolist())),),
        kind_of_layer=(0,) * layers,
        attention_scale=head_size**-0.5,
        tied_embeddings=False,
        **sizes,
    )


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Large enough that greedy choices are not ties."""
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype, device=device)

    def product(rows: int, columns: int) -> Linear:
        return Linear(noise(rows, columns) * (1.5 / columns**0.5))

    def norm() -> Tensor:
        return 1 + 0.1 * noise(config.hidden_size)

    hidden, inner, queries = config.hidden_size, config.intermediate_size, config.heads * config.head_size
    return Weights(
        embedding=noise(config.vocab_size, hidden),
        layers=tuple(
            LayerWeights(
                attention_norm=norm(),
                qkv=product(queries + 2 * config.kv_heads * config.head_size, hidden),
                output=product(hidden, queries),
                mlp_norm=norm(),
                gate_up=product(2 * inner, hidden),
                down=product(hidden, inner),
            )
            for _ in range(config.layers)
        ),
        norm=norm(),
        lm_head=product(config.vocab_size, hidden),
    )


def runner_of(
    model: CudaModel,
    max_num_seqs: int,
    max_tokens: int,
    max_model_len: int,
    num_blocks: int,
    sizes: GraphSizes = NO_GRAPHS,
) -> CudaRunner:
    return CudaRunner(
        model,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_model_len=max_model_len,
        sizes=sizes,
    )


def tables_for(count: int, tokens: int) -> list[list[int]]:
    pages = -(-tokens // BLOCK_SIZE)
    return [list(range(1 + i * pages, 1 + (i + 1) * pages)) for i in range(count)]


def greedy(runner: ModelRunner, prompts: Sequence[tuple[int, ...]], count: int, chunk: int) -> list[list[int]]:
    """All at once, prompts in chunks beside the decodes of others, one step ahead of what is read."""
    tables = tables_for(len(prompts), max(map(len, prompts)) + count)
    computed, sampled = [0] * len(prompts), [0] * len(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    flights = []
    number = 0
    while min(sampled) < count:
        rows, starts, owners = [], [], []
        for slot, prompt in enumerate(prompts):
            if sampled[slot] >= count:
                continue
            start = computed[slot]
            if start < len(prompt):
                ids = prompt[start : start + chunk]
                last = start + len(ids) == len(prompt)
                rows.append(Row(slot, len(ids), ids, tables[slot], last, GREEDY))
            else:
                last = True
                rows.append(Row(slot, 1, (), tables[slot], True, GREEDY, use_last_sampled=True))
            starts.append(start)
            computed[slot] += rows[-1].length
            sampled[slot] += last
            owners.append(slot)
        flights.append((owners, runner.submit(Step(number, tuple(rows), tuple(starts)))))
        number += 1
        if len(flights) > 1 or min(sampled) >= count:
            while len(flights) > (min(sampled) < count):
                owners, handle = flights.pop(0)
                for slot, tokens in zip(owners, handle.result().token_ids, strict=True):
                    outputs[slot].extend(tokens)
    return outputs
