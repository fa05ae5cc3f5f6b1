"""`poolwright-engine check`: what `serve` would serve, found out as `serve` finds it out. Prints; decides nothing."""

from collections.abc import Sequence

from poolwright_engine.process import assembly, source
from poolwright_engine.process.config import EngineConfig
from poolwright_engine.process.ports import options_taken


def check(config: EngineConfig) -> int:
    """Raises ConfigError where `serve` would; but a port that is taken now is only said."""
    taken = options_taken(config)
    parts = assembly.load(config)
    try:
        facts = report(config, parts) | of_server(config, taken)
        print("\n".join(f"{name:<24}{value}" for name, value in facts.items()))
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
        "KV cache": f"{blocks} blocks of {config.block_size} tokens, {kv.bytes_per_token} bytes a token "
        f"in {config.kv_dtype(parts.dtype)}, {source.size(blocks * config.block_size * kv.bytes_per_token)}",
        "host memory for KV": source.size(plan.swap_space_bytes),
        "at once": f"{plan.max_num_seqs} requests, {blocks * config.block_size // plan.max_model_len} of the longest",
        "budget": budget,
        "prompts": "in chunks" if plan.chunked_prefill else "whole",
        "batching": f"{config.batching}, {config.scheduling_policy}",
        "sampling": str(parts.sampling_defaults) or "as requests say; nothing of the model's",
        "chat template": "yes" if parts.tokenizer.chat_template else "none: /v1/chat/completions is refused",
        "fingerprint": parts.fingerprint,
    }


def of_server(config: EngineConfig, taken: Sequence[str] = ()) -> dict[str, str]:
    api, admin, kv = (str(port or "any") for port in (config.port, config.admin_port, config.kv_port))
    listens = f"{config.host}, port {api}, admin port {admin}, KV port {kv}"
    keep_alive, keys = config.sse_keep_alive_seconds, len(config.api_keys)
    return {
        "listens on": listens + (f"; taken now: {', '.join(taken)}" if taken else ""),
        "API keys": f"{keys}, of which clients of /v1 must bring one" if keys else "none: clients of /v1 need none",
        "silent streams": f"a comment every {keep_alive:g} s" if keep_alive else "no comments",
        "without progress": f"/ready is 503 after {config.stall_seconds:g} s, and the process ends after "
        f"{config.stall_exit_seconds:g} s",
        "at SIGTERM": f"running requests have {config.shutdown_timeout_seconds:g} s to finish",
    }
