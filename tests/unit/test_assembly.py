"""Every option that is the engine loop's reaches it; each of the others is known to belong elsewhere."""

from dataclasses import fields, replace
from typing import Any, cast

import pytest

from poolwright_engine.loop.engine_loop import EngineLoop, LoopConfig
from poolwright_engine.process import assembly
from poolwright_engine.process.config import Device, EngineConfig, Usage, plan
from poolwright_engine.scheduling.scheduler_config import (
    Batching,
    PreemptionMode,
    SchedulingPolicy,
    TbtDeadlines,
    TokenBudget,
)
from poolwright_protocol.roles import Role
from poolwright_protocol.step_time import StepCost, StepProfile
from support.scripted_runner import ScriptedRunner

CONFIG = EngineConfig(model="m", served_model_names=("m",), tbt_target_milliseconds=100.0)
# By option: another value than CONFIG's, and what the loop is then told by which name.
OF_THE_LOOP: dict[str, tuple[Any, str, Any]] = {
    "max_num_batched_tokens": (1024, "max_num_batched_tokens", 1024),
    "max_num_scheduled_tokens": (512, "max_num_scheduled_tokens", 512),
    "max_num_seqs": (9, "max_num_seqs", 9),
    "max_num_queued": (7, "max_waiting", 7),
    "enable_chunked_prefill": (False, "chunked_prefill", False),
    "long_prefill_token_threshold": (33, "long_prefill_token_threshold", 33),
    "batching": (Batching.VLLM, "batching", Batching.VLLM),
    "scheduling_policy": (SchedulingPolicy.PRIORITY, "scheduling_policy", SchedulingPolicy.PRIORITY),
    "enable_prefix_caching": (False, "enable_prefix_caching", False),
    "watermark": (0.2, "watermark", 0.2),
    "preemption_mode": (PreemptionMode.SWAP, "preemption", PreemptionMode.SWAP),
    "token_budget": (TokenBudget.AUTO, "token_budget", TokenBudget.AUTO),
    "tbt_target_milliseconds": (50.0, "tbt_target_seconds", 0.05),
    "tbt_deadlines": (TbtDeadlines.EACH, "tbt_deadlines", TbtDeadlines.EACH),
    "quick_first_tokens": (False, "quick_first_tokens", False),
    "static_batch_size": (3, "static_batch_size", 3),
    "static_window_milliseconds": (20.0, "static_window_seconds", 0.02),
    "num_speculative_tokens": (4, "speculative_ngram_tokens", 4),
    "usage": (Usage.OFFLINE, "quick_first_tokens", False),
}
OF_ITS_IDENTITY = {"pod_uid": "uid-9", "role": Role.TOKEN, "role_epoch": 5}
ELSEWHERE = {
    # Where the model comes from, how it is computed, and how large the cache is: what `load` made of them is in Parts.
    *("model", "revision", "download_dir", "chat_template", "device", "dtype", "quantization", "batch_invariant"),
    *("enforce_eager", "max_model_len", "block_size", "kv_cache_dtype", "kv_cache_mebibytes", "gpu_memory_utilization"),
    *("swap_space_gibibytes", "step_profile", "cpu_threads", "cpu_duty_percent", "cpu_linear_form", "cpu_operations"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    # What requests and clients meet.
    *("served_model_names", "seed", "generation_config", "override_generation_config", "host", "port", "admin_port"),
    *("kv_port", "sse_keep_alive_seconds", "api_keys", "shutdown_timeout_seconds", "stall_seconds"),
    *("stall_exit_seconds", "pod_ip", "pool", "pool_namespace", "pool_key"),
}


def loop_of(config: EngineConfig, **changes: Any) -> EngineLoop:
    model = cast(Any, None)
    parts = assembly.Parts(
        ScriptedRunner(num_blocks=70, block_size=16),
        model,
        997,
        8,
        "fingerprint",
        model,
        plan(config, Device("cpu"), 1024),
        model,
        "float32",
        None,
    )
    return assembly.engine_loop(config, replace(parts, tokenizer=cast(Any, _Tokenizer), **changes))


class _Tokenizer:
    eos_ids = frozenset({0})


def told(config: EngineConfig, **changes: Any) -> LoopConfig:
    return loop_of(config, **changes)._config


def test_every_option_has_a_place() -> None:
    options = {field.name for field in fields(EngineConfig)}
    assert options == {*OF_THE_LOOP, *OF_ITS_IDENTITY, *ELSEWHERE}
    assert len(options) == len(OF_THE_LOOP) + len(OF_ITS_IDENTITY) + len(ELSEWHERE)


@pytest.mark.parametrize("option", OF_THE_LOOP)
def test_an_option_reaches_the_loop(option: str) -> None:
    value, name, expected = OF_THE_LOOP[option]
    changed = replace(CONFIG, **{option: value})
    assert getattr(told(changed), name) == expected
    assert getattr(told(CONFIG), name) != expected


def test_first_tokens_are_quick_on_a_server_of_its_own_and_in_a_pool_where_asked_for() -> None:
    in_pool = replace(CONFIG, role=Role.MIXED)
    assert told(CONFIG).quick_first_tokens
    assert not told(in_pool).quick_first_tokens
    assert told(replace(in_pool, quick_first_tokens=True)).quick_first_tokens
    assert not told(replace(CONFIG, usage=Usage.OFFLINE, quick_first_tokens=True)).quick_first_tokens


def test_who_the_machine_is_reaches_the_loop() -> None:
    identity = loop_of(replace(CONFIG, **OF_ITS_IDENTITY)).identity
    assert (identity.pod_uid, identity.role, identity.role_epoch) == ("uid-9", Role.TOKEN, 5)


def test_what_was_found_at_the_start_reaches_the_loop() -> None:
    cost = StepCost(0.01, 1e-5, 1e-8)
    profile = StepProfile(cost, cost)
    made = told(CONFIG, step_profile=profile, prompt_token_seconds=0.25, swap_bytes_per_second=3e9, fingerprint="other")
    assert (made.max_model_len, made.max_step_seconds) == (1024, 2.0)
    assert (made.step_profile, made.prompt_token_seconds) == (profile, 0.25)
    assert (made.swap_bytes_per_second, made.model_identity) == (3e9, "other")


def test_nothing_of_the_loop_is_left_at_its_default_unsaid() -> None:
    """Beside what no option is for: those are the scheduler's own."""
    named = {name for _, name, _ in OF_THE_LOOP.values()}
    found = {"max_model_len", "max_step_seconds", "step_profile", "prompt_token_seconds", "swap_bytes_per_second"}
    own = {"tile_tokens", "model_identity", "ungranted_share_percent", "max_preemptions", "relegated_seconds"}
    assert {field.name for field in fields(LoopConfig)} == named | found | own
