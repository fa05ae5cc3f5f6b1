"""`poolwright-engine check`: what `serve` would serve, found out as `serve` finds it out. Prints; decides nothing."""

from poolwright_engine.process import assembly, source
from poolwright_engine.process.config import EngineConfig


def check(config: EngineConfig) -> int:
    """Raises ConfigError where `serve` would."""
    parts = assembly.load(config)
    try:
        print("\n".join(f"{name:<24}{value}" for name, value in report(config, parts).items()))
    finally:
        parts.runner.close()
    return 0


def report(config: EngineConfig, parts: assembly.Parts) -> dict[str, str]:
    model, plan, runner = parts.model, parts.plan, parts.runner
    kv = runner.kv_shape
    blocks = runner.num_blocks - 1  # without the null block
    budget = f"{plan.max_num_batched_tokens} tokens a step"
    if config.tbt_target_milliseconds is not None:
        budget += f", at most; gaps of {config.tbt_target_milliseconds:g} ms between tokens are kept"
    if plan.max_step_seconds is not None:
        budget += f", fewer where prompts would take more than {plan.max_step_seconds:g} s of it"
    return {
        "model": config.model,
        "served as": ", ".join(config.served_model_names),
        "architecture": model.architecture,
        "dtype": parts.dtype + ("" if config.quantization == "none" else f", weights in {config.quantization}"),
        "layers": f"{kv.layers}, {model.heads} heads of {kv.head_size}, {kv.kv_heads} of them with KV",
        "vocabulary": f"{model.vocab_size} tokens",
        "context": f"{plan.max_model_len} tokens of the model's {model.context_length}",
        "KV cache": f"{blocks} blocks of {config.block_size} tokens, {kv.bytes_per_token} bytes a token, "
        f"{source.size(blocks * config.block_size * kv.bytes_per_token)}",
        "host memory for KV": source.size(plan.swap_space_bytes),
        "at once": f"{plan.max_num_seqs} requests, {blocks * config.block_size // plan.max_model_len} of the longest",
        "budget": budget,
        "prompts": "in chunks" if plan.chunked_prefill else "whole",
        "batching": f"{config.batching}, {config.scheduling_policy}",
        "chat template": "yes" if parts.tokenizer.chat_template else "none: /v1/chat/completions is refused",
        "fingerprint": parts.fingerprint,
    }
