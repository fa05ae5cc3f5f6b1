"""transformers as the oracle of greedy tokens and logits, and this engine's answers in the same form."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from poolwright_engine.checkpoint.loader import LoadedModel
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.model.cpu_attention import AttentionRow
from poolwright_engine.model.llama import KVCache
from poolwright_engine.scheduling.runner import Row, Step
from poolwright_engine.scheduling.sequence import SamplingParams
from poolwright_protocol.kv import blocks_for

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
TIE = 1e-3  # transformers' own two best are closer than rounding differs between batch shapes


@dataclass(frozen=True)
class Expected:
    """What transformers makes of one prompt: its greedy tokens, and the logits of all positions of prompt and tokens,
    or of the last of them."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logits: Tensor

    @property
    def first_position(self) -> int:
        """Of the logits."""
        return len(self.prompt_ids) + len(self.output_ids) - len(self.logits)


@functools.lru_cache(maxsize=1)
def transformers_of_gguf(path: Path) -> Any:
    """transformers' own float32 model of a GGUF file. Kept for the next module: loading it takes longer than asking."""
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        # transformers makes the same map once per module and reads the file twice: most of the time it takes to load.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()


def ask_transformers(model: Any, prompts: Sequence[Sequence[int]], count: int, keep_logits: int = 0) -> list[Expected]:
    """Prompts of one length share a batch, so none is padded. `keep_logits`: of the last so many positions; 0: all."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    answers: dict[int, Expected] = {}
    with torch.inference_mode():
        for length, indices in by_length.items():
            asked = torch.tensor([list(prompts[index]) for index in indices])
            made = model.generate(
                asked,
                attention_mask=torch.ones_like(asked),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
            for index, ids, logits in zip(indices, made, model(made, logits_to_keep=keep_logits).logits, strict=True):
                answers[index] = Expected(tuple(prompts[index]), tuple(ids[length:].tolist()), logits)
    return [answers[index] for index in range(len(prompts))]


def assert_same_tokens(found: Sequence[int], expected: Expected) -> None:
    """Equal, or different only from a point on where transformers' two best tokens tie."""
    for index, (ours, theirs) in enumerate(zip(found, expected.output_ids, strict=True)):
        if ours != theirs:
            position = len(expected.prompt_ids) + index - 1
            best = expected.logits[position - expected.first_position].topk(2).values
            gap = float(best[0] - best[1])
            assert gap < TIE, f"token {index} is {ours}, transformers' is {theirs} by {gap}"
            return


def assert_greedy(model: Any, prompt: Sequence[int], found: Sequence[int]) -> None:
    """Each token is transformers' best after the prompt and the tokens before it, or ties with it. As strong as having
    it generate, and one forward pass."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *found]]), logits_to_keep=len(found) + 1).logits[0, :-1]
    for index, (ours, of_token) in enumerate(zip(found, logits, strict=True)):
        gap = float(of_token.max() - of_token[ours])
        assert gap < TIE, f"token {index} is {ours}, transformers' is {int(of_token.argmax())} by {gap}"


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
            rows, starts, owners = [], [], []
            for slot, prompt in enumerate(prompts):
                if number < slot or len(outputs[slot]) == count:
                    continue
                start = done[slot]
                if start < len(prompt):
                    ids = tuple(prompt[start : start + chunk])
                    last = start + len(ids) == len(prompt)
                    rows.append(Row(slot, len(ids), ids, tuple(tables[slot]), last, GREEDY))
                else:
                    rows.append(Row(slot, 1, (), tuple(tables[slot]), True, GREEDY, use_last_sampled=True))
                starts.append(start)
                owners.append(slot)
                done[slot] += rows[-1].length
            result = runner.submit(Step(number, tuple(rows), tuple(starts))).result()
            for slot, token_ids in zip(owners, result.token_ids, strict=True):
                outputs[slot].extend(token_ids)
            number += 1
    finally:
        runner.close()
    return outputs


def forced_logits(loaded: LoadedModel, expected: Expected, chunk: int, block_size: int) -> Tensor:
    """Logits of the positions of the expected ones when prompt and output are fed in chunks."""
    ids = expected.prompt_ids + expected.output_ids
    blocks = tuple(range(blocks_for(len(ids), block_size), 0, -1))
    cache = KVCache(loaded.config.kv_shape(loaded.model.dtype), len(blocks) + 1, block_size, loaded.model.dtype)
    parts = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        wanted = range(max(0, expected.first_position - start), len(part))
        row = AttentionRow(start, len(part), blocks)
        parts.append(loaded.model.forward(torch.tensor(part), [row], cache, wanted))
    return torch.cat(parts)
