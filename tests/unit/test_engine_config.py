"""Options that cannot work are refused by name, in one line, before anything is loaded; the rest comes to a plan."""

import pytest

from poolwright_engine.process.config import (
    BATCH_DEFAULTS,
    CPU_STEP_SECONDS,
    TILE_TOKENS,
    ConfigError,
    Device,
    EngineConfig,
    Plan,
    Usage,
    dtype_on,
    from_environment,
    plan,
)
from poolwright_engine.scheduling.scheduler_config import Batching, PreemptionMode, TokenBudget
from poolwright_protocol import names
from poolwright_protocol.roles import Role


def config(**changes: object) -> EngineConfig:
    return EngineConfig(**{"model": "model.gguf", "served_model_names": ("m",), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: 2 is not supported"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"data_parallel_size": 3}, "--data-parallel-size"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-seqs"),
        ({"max_num_scheduled_tokens": 0}, "--max-num-scheduled-tokens: expected a positive integer, not 0"),
        (
            {"max_num_scheduled_tokens": 8, "max_num_seqs": 16},
            r"--max-num-scheduled-tokens \(8\) must be at least --max-num-seqs \(16\)",
        ),
        (
            {"enable_chunked_prefill": False, "max_model_len": 4096, "max_num_scheduled_tokens": 2048},
            r"--no-enable-chunked-prefill needs --max-num-scheduled-tokens \(2048\)",
        ),
        ({"block_size": 0}, "--block-size"),
        ({"kv_cache_mebibytes": -1}, "--kv-cache-mebibytes"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"port": 70000}, "--port"),
        ({"port": 8001}, "must differ"),
        ({"cpu_duty_percent": 0}, "--cpu-duty-percent"),
        ({"cpu_threads": 0}, "--cpu-threads"),
        ({"dtype": "int4"}, "--dtype"),
        ({"shutdown_timeout_seconds": -1.0}, "--shutdown-timeout"),
        (
            {"enable_chunked_prefill": False, "max_model_len": 4096, "max_num_batched_tokens": 2048},
            r"--no-enable-chunked-prefill needs --max-num-batched-tokens \(2048\)",
        ),
        ({"served_model_names": ("m", "")}, "--served-model-name"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"quantization": "fp8"}, "--quantization: 'fp8' is not supported; expected one of none, int8, int4"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype: 'fp4' is not supported; expected one of auto, fp8"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"swap_space_gibibytes": -1.0}, "--swap-space"),
        ({"watermark": 1.0}, "--watermark"),
        ({"num_speculative_tokens": -1}, "--num-speculative-tokens"),
        ({"stall_seconds": 60.0, "stall_exit_seconds": 30.0}, "--stall-seconds"),
        ({"token_budget": TokenBudget.AUTO}, "needs --tbt-target-ms"),
        (
            {"token_budget": TokenBudget.AUTO, "tbt_target_milliseconds": 50.0, "enable_chunked_prefill": False},
            "auto needs chunked prefill",
        ),
        ({"batching": Batching.ORCA, "enable_chunked_prefill": True}, "--batching orca computes prompts whole"),
        ({"tbt_target_milliseconds": 0.0}, "--tbt-target-ms"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refusal:
        config(**changes)
    assert "\n" not in str(refusal.value)


def test_ports_of_zero_may_repeat() -> None:
    assert config(port=0, admin_port=0, kv_port=0).port == 0


def test_peers_connect_to_the_pod_ip_when_there_is_one() -> None:
    assert config(pod_ip="10.0.0.7").advertised_host == "10.0.0.7"
    assert config(host="127.0.0.3").advertised_host == "127.0.0.3"
    assert config().advertised_host == "127.0.0.1"


def test_the_environment_says_who_and_where_the_machine_is() -> None:
    found = from_environment(
        {
            names.ENV_ROLE: "token",
            names.ENV_ROLE_EPOCH: "7",
            names.ENV_POD_UID: "uid-1",
            names.ENV_POD_IP: "10.0.0.7",
            names.ENV_POOL: "chat",
            names.ENV_POOL_NAMESPACE: "default",
            names.ENV_POOL_KEY: "ab" * 32,
            names.ENV_API_KEY: "sesame",
        }
    )
    assert config(**found) == config(
        role=Role.TOKEN,
        role_epoch=7,
        pod_uid="uid-1",
        pod_ip="10.0.0.7",
        pool="chat",
        pool_namespace="default",
        pool_key=bytes.fromhex("ab" * 32),
        api_keys=("sesame",),
    )


def test_an_empty_environment_gives_no_role_and_a_key_that_nobody_knows() -> None:
    one, other = from_environment({}), from_environment({})
    assert one["role"] is None
    assert one["role_epoch"] == 0
    assert len(one["pool_key"]) == 32  # type: ignore[arg-type]
    assert one["pool_key"] != other["pool_key"]
    assert one["pod_uid"] != other["pod_uid"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (names.ENV_ROLE, "Prompt"),
        (names.ENV_ROLE_EPOCH, "-1"),
        (names.ENV_ROLE_EPOCH, "1.5"),
        (names.ENV_POOL_KEY, "secret"),
    ],
)
def test_a_bad_variable_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        from_environment({name: value})


def test_keys_are_not_printed() -> None:
    printed = repr(config(pool_key=bytes.fromhex("ab" * 32), api_keys=("sesame",)))
    assert "abab" not in printed
    assert "sesame" not in printed


# --- the plan ----------------------------------------------------------------------------------------------------

CPU = Device("cpu")
GIB = 2**30


def planned(max_model_len: int = 4096, device: Device = CPU, can_chunk: bool = True, **changes: object) -> Plan:
    return plan(config(**changes), device, max_model_len, can_chunk)


@pytest.mark.parametrize(
    ("device", "usage", "budget", "seats"),
    [
        (CPU, Usage.SERVER, 2048, 128),
        (CPU, Usage.OFFLINE, 4096, 256),
        (Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * GIB), Usage.SERVER, 2048, 256),
        (Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * GIB), Usage.OFFLINE, 8192, 256),
        (Device("cuda", "NVIDIA L4", 24 * GIB), Usage.SERVER, 2048, 256),
        (Device("cuda", "NVIDIA H100 80GB HBM3", 80 * GIB), Usage.SERVER, 8192, 1024),
        (Device("cuda", "NVIDIA H200", 141 * GIB), Usage.OFFLINE, 16384, 1024),
        (Device("cuda", "NVIDIA B200", 180 * GIB), Usage.SERVER, 16384, 1024),
    ],
)
def test_defaults_follow_device_and_usage(device: Device, usage: Usage, budget: int, seats: int) -> None:
    made = planned(device=device, usage=usage)
    assert (made.max_num_batched_tokens, made.max_num_seqs) == (budget, seats)
    assert made.warnings == ()


def test_every_device_has_its_row() -> None:
    rows = {Device("cpu").row} | {Device("cuda", "", size * GIB).row for size in (8, 80, 200)}
    assert rows == set(BATCH_DEFAULTS)


def test_a_small_budget_brings_fewer_seats_and_many_seats_a_larger_budget() -> None:
    assert planned(max_num_batched_tokens=64).max_num_seqs == 64
    assert planned(max_num_seqs=5000).max_num_batched_tokens == 5000


def test_fewer_tokens_may_be_scheduled_than_a_step_has_memory_for() -> None:
    fewer = planned(max_num_scheduled_tokens=64)
    assert (fewer.max_num_batched_tokens, fewer.max_num_seqs, fewer.warnings) == (2048, 64, ())
    (warning,) = planned(max_num_scheduled_tokens=4096).warnings
    assert "--max-num-scheduled-tokens 4096 has no effect: steps have memory for 2048" in warning
    assert planned(8192, usage=Usage.OFFLINE, max_num_scheduled_tokens=512).chunked_prefill
    with pytest.raises(ConfigError, match=r"--batching orca computes prompts whole, which needs --max-num-scheduled"):
        planned(batching=Batching.ORCA, max_num_scheduled_tokens=512)


def test_no_more_tokens_than_all_seats_can_fill() -> None:
    assert planned(max_model_len=8, max_num_seqs=4).max_num_batched_tokens == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_chunked_prefill": False},
        {"batching": Batching.ORCA},
        {"batching": Batching.STATIC},
        {"can_chunk": False},
    ],
    ids=str,
)
def test_whole_prompts_need_a_step_that_holds_the_longest(changes: dict[str, object]) -> None:
    made = planned(max_model_len=8192, **changes)  # type: ignore[arg-type]
    assert (made.chunked_prefill, made.max_num_batched_tokens) == (False, 8192)
    with pytest.raises(ConfigError, match=r"4096.*8192.*could never be scheduled"):
        planned(max_model_len=8192, max_num_batched_tokens=4096, **changes)  # type: ignore[arg-type]


def test_an_architecture_that_cannot_chunk_says_that_it_does_not() -> None:
    made = planned(can_chunk=False, enable_chunked_prefill=True)
    assert not made.chunked_prefill
    assert "--enable-chunked-prefill: this architecture needs prompts whole" in made.warnings[0]


def test_serving_cuts_prompts_and_offline_does_not_unless_they_are_very_long() -> None:
    assert planned().chunked_prefill
    assert not planned(usage=Usage.OFFLINE).chunked_prefill
    assert planned(usage=Usage.OFFLINE, enable_chunked_prefill=True).chunked_prefill
    assert planned(131072, usage=Usage.OFFLINE).chunked_prefill
    assert planned(131072, usage=Usage.OFFLINE).max_num_batched_tokens == 4096
    assert planned(8192, usage=Usage.OFFLINE, max_num_batched_tokens=512).chunked_prefill


def test_a_budget_that_leaves_a_tile_half_empty_is_warned_of() -> None:
    warnings = planned(max_num_batched_tokens=TILE_TOKENS * 4 + 1).warnings
    assert f"no multiple of the tile of {TILE_TOKENS} tokens" in warnings[0]
    assert planned(max_num_batched_tokens=TILE_TOKENS * 4).warnings == ()


def test_what_vllm_warns_of_is_warned_of_and_what_it_refuses_is_refused() -> None:
    assert "can fill" in planned(max_model_len=64, max_num_batched_tokens=1024, max_num_seqs=4).warnings[0]
    with pytest.raises(ConfigError, match=r"--long-prefill-token-threshold \(5000\)"):
        planned(long_prefill_token_threshold=5000)
    assert "no meaning on a CPU" in planned(gpu_memory_utilization=0.9).warnings[0]
    assert "takes --kv-cache-mebibytes (512)" in planned(gpu_memory_utilization=0.9).warnings[0]
    assert planned(gpu_memory_utilization=0.9, device=Device("cuda", "", 80 * GIB)).warnings == ()


def test_host_memory_is_taken_where_it_is_other_memory() -> None:
    assert planned().swap_space_bytes == 0
    assert planned(device=Device("cuda", "", 80 * GIB)).swap_space_bytes == 4 * GIB
    assert planned(device=Device("cuda"), preemption_mode=PreemptionMode.RECOMPUTE).swap_space_bytes == 0
    assert planned(preemption_mode=PreemptionMode.SWAP).swap_space_bytes == 4 * GIB
    assert planned(swap_space_gibibytes=0.5).swap_space_bytes == GIB // 2
    assert "recomputed" in planned(preemption_mode=PreemptionMode.SWAP, swap_space_gibibytes=0.0).warnings[0]


def test_precision_follows_the_device() -> None:
    gpu = Device("cuda", "", 80 * GIB)
    assert dtype_on(config(), CPU, "bfloat16") == "float32"
    assert dtype_on(config(), gpu, "float16") == "float16"
    assert dtype_on(config(), gpu, "float32") == "bfloat16"
    assert dtype_on(config(dtype="bfloat16"), CPU, "float32") == "bfloat16"
    with pytest.raises(ConfigError, match="--dtype: float16 is not supported on a CPU"):
        dtype_on(config(dtype="float16"), CPU, "float32")


def test_eight_bits_of_kv_need_a_gpu_that_has_such_numbers() -> None:
    eight = config(kv_cache_dtype="fp8")
    assert dtype_on(eight, Device("cuda", "NVIDIA H200", 141 * GIB, capability=90), "bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match="--kv-cache-dtype: fp8 needs a GPU; on a CPU KV has the precision"):
        dtype_on(eight, CPU, "float32")
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or later; NVIDIA A100 has 8\.0"):
        dtype_on(eight, Device("cuda", "NVIDIA A100", 80 * GIB, capability=80), "bfloat16")
    assert (config().kv_dtype("bfloat16"), eight.kv_dtype("bfloat16")) == ("bfloat16", "fp8")


def test_only_a_cpu_that_serves_with_a_budget_nobody_chose_keeps_pace() -> None:
    assert planned().max_step_seconds == CPU_STEP_SECONDS
    assert planned(max_num_batched_tokens=2048).max_step_seconds is None
    assert planned(usage=Usage.OFFLINE, max_model_len=20_000).max_step_seconds is None
    assert planned(device=Device("cuda", "", 80 * GIB)).max_step_seconds is None
    assert planned(enable_chunked_prefill=False).max_step_seconds is None
