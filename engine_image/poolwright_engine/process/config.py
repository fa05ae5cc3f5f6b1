"""What an engine process was told, once, as one frozen value; and what it comes to on a device and for a model.

Owns options, the environment of the pod, defaults and refusals, each of which names its option. Knows neither the
model's files nor the server, and no torch.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from poolwright_engine.scheduling.scheduler_config import (
    Batching,
    PreemptionMode,
    SchedulingPolicy,
    TbtDeadlines,
    TokenBudget,
)
from poolwright_protocol import keys, names
from poolwright_protocol.roles import Role

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = ("none", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "fp8")
FP8_CAPABILITY = 89
GENERATION_CONFIG_OF_MODEL = "auto"
NO_GENERATION_CONFIG = "vllm"  # as vLLM spells it
CPU_LINEAR_FORMS = ("auto", "rows", "columns", "packed")  # see model/linear.py
CPU_OPERATIONS = ("auto", "native", "torch")  # see native/library.py
# A kubelet grants 30 s by default; what is cut off must still be told so within them.
DEFAULT_SHUTDOWN_SECONDS = 20.0
DEFAULT_KV_CACHE_MEBIBYTES = 512  # on a CPU
# Readiness falls within 15 s of a stall; a load balancer needs a few of them to look.
DEFAULT_STALL_SECONDS = 10.0
DEFAULT_STALL_EXIT_SECONDS = 120.0
# Rows of a matrix product that the hardware computes together: a step of one more than a multiple costs a whole tile
# more, up to 32 % of a prompt's time (Sarathi-Serve, OSDI 2024, section 4.3).
TILE_TOKENS = 64
# Whole prompts are the offline default up to the largest step of the table below; a longer one would need activations
# without bound.
LARGEST_STEP_TOKENS = 16384
# On a CPU, where nobody said how large a step may be: how long one prompt may keep all others waiting.
CPU_STEP_SECONDS = 2.0
_GIB = 2**30


class ConfigError(ValueError):
    """The text is one line, for a person, and names the option or variable."""


class Usage(StrEnum):
    SERVER = "server"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Device:
    kind: str  # "cpu" or "cuda"
    name: str = ""
    memory_bytes: int = 0
    capability: int = 0  # of a GPU, 10 · major + minor

    @property
    def row(self) -> str:
        """Of the table of defaults."""
        if self.kind == "cpu":
            return "CPU"
        if self.memory_bytes >= 160 * _GIB:
            return "GPU of 160 GiB or more"
        # In an A100 large steps cost throughput (vLLM pull request 17885).
        if self.memory_bytes >= 70 * _GIB and "a100" not in self.name.lower():
            return "GPU of 70 GiB or more, but no A100"
        return "any other GPU"


# (--max-num-batched-tokens, --max-num-seqs) where they are not given: vLLM 0.32's, engine/arg_utils.py,
# EngineArgs.get_batch_defaults.
BATCH_DEFAULTS: Mapping[str, Mapping[Usage, tuple[int, int]]] = {
    "CPU": {Usage.SERVER: (2048, 128), Usage.OFFLINE: (4096, 256)},
    "any other GPU": {Usage.SERVER: (2048, 256), Usage.OFFLINE: (8192, 256)},
    "GPU of 70 GiB or more, but no A100": {Usage.SERVER: (8192, 1024), Usage.OFFLINE: (16384, 1024)},
    "GPU of 160 GiB or more": {Usage.SERVER: (16384, 1024), Usage.OFFLINE: (16384, 1024)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """None: not said; `plan` chooses. `role` None: acts as mixed, has no PUT role, and accepts any.
    `served_model_names`: the first is the one that answers carry. `swap_space_gibibytes` None: none on a CPU, where
    it would be the same memory; 4 on a GPU. `kv_cache_mebibytes` None: a default on a CPU; on a GPU, what
    `gpu_memory_utilization` leaves."""

    model: str
    served_model_names: tuple[str, ...]
    usage: Usage = Usage.SERVER
    revision: str | None = None
    download_dir: str | None = None
    chat_template: str | None = None
    generation_config: str = GENERATION_CONFIG_OF_MODEL
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    seed: int | None = None
    batch_invariant: bool = False
    enforce_eager: bool = False

    host: str = "0.0.0.0"
    port: int = names.API_PORT
    admin_port: int = names.ADMIN_PORT
    kv_port: int = names.KV_PORT
    sse_keep_alive_seconds: float = 15.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    shutdown_timeout_seconds: float = DEFAULT_SHUTDOWN_SECONDS
    stall_seconds: float = DEFAULT_STALL_SECONDS
    stall_exit_seconds: float = DEFAULT_STALL_EXIT_SECONDS

    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None
    token_budget: TokenBudget = TokenBudget.FIXED
    tbt_target_milliseconds: float | None = None
    quick_first_tokens: bool | None = None
    tbt_deadlines: TbtDeadlines = TbtDeadlines.CUMULATIVE
    step_profile: str | None = None
    max_num_seqs: int | None = None
    max_num_queued: int = 1024
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int = 0
    batching: Batching = Batching.SARATHI
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    static_batch_size: int | None = None
    static_window_milliseconds: float = 100.0
    num_speculative_tokens: int = 0

    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_mebibytes: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    swap_space_gibibytes: float | None = None
    watermark: float = 0.01

    cpu_threads: int | None = None
    cpu_duty_percent: int = 100
    cpu_linear_form: str = "auto"
    cpu_operations: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    role: Role | None = None
    role_epoch: int = 0
    pod_uid: str = ""
    pod_ip: str = ""
    pool: str = ""
    pool_namespace: str = ""
    pool_key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        self._check_names_and_ports()
        for option, count in (
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-scheduled-tokens", self.max_num_scheduled_tokens),
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-queued-reqs", self.max_num_queued),
            ("--static-batch-size", self.static_batch_size),
            ("--block-size", self.block_size),
            ("--kv-cache-mebibytes", self.kv_cache_mebibytes),
            ("--max-model-len", self.max_model_len),
            ("--cpu-threads", self.cpu_threads),
        ):
            if count is not None and count < 1:
                raise ConfigError(f"{option}: expected a positive integer, not {count}")
        for option, amount in (
            ("--long-prefill-token-threshold", self.long_prefill_token_threshold),
            ("--num-speculative-tokens", self.num_speculative_tokens),
            ("--static-window-ms", self.static_window_milliseconds),
            ("--swap-space", self.swap_space_gibibytes),
            ("--sse-keep-alive-interval", self.sse_keep_alive_seconds),
            ("--shutdown-timeout", self.shutdown_timeout_seconds),
            (names.ENV_ROLE_EPOCH, self.role_epoch),
        ):
            if amount is not None and amount < 0:
                raise ConfigError(f"{option}: expected 0 or more, not {amount}")
        for option, size in (
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
            ("--data-parallel-size", self.data_parallel_size),
        ):
            if size != 1:
                raise ConfigError(f"{option}: {size} is not supported; this engine runs on one device (1)")
        for option, value, known in (
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, DTYPES),
            ("--quantization", self.quantization, QUANTIZATIONS),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("--cpu-linear-form", self.cpu_linear_form, CPU_LINEAR_FORMS),
            ("--cpu-operations", self.cpu_operations, CPU_OPERATIONS),
        ):
            if value not in known:
                raise ConfigError(f"{option}: {value!r} is not supported; expected one of {', '.join(known)}")
        if not 1 <= self.cpu_duty_percent <= 100:
            raise ConfigError(f"--cpu-duty-percent: expected 1 to 100, not {self.cpu_duty_percent}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization: expected a share in (0, 1], not {self.gpu_memory_utilization}"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"--watermark: expected a share in [0, 1), not {self.watermark}")
        if not 0 < self.stall_seconds < self.stall_exit_seconds:
            raise ConfigError(
                f"--stall-seconds ({self.stall_seconds:g}) must be positive and less than --stall-exit-seconds "
                f"({self.stall_exit_seconds:g}): a machine is taken out of service before it is given up"
            )
        self._check_budget()

    def _check_names_and_ports(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("--served-model-name: expected a name, not an empty string")
        if not all(self.api_keys):
            raise ConfigError("--api-key: expected a key, not an empty string")
        for option, port in (("--port", self.port), ("--admin-port", self.admin_port), ("--kv-port", self.kv_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{option}: expected a port from 0 to 65535, not {port}")
        ports = [port for port in (self.port, self.admin_port, self.kv_port) if port]
        if len(ports) != len(set(ports)):
            raise ConfigError("--port, --admin-port and --kv-port must differ")

    def _check_budget(self) -> None:
        """What can be refused before the model is known."""
        budget, seats = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seats is not None and budget < seats:
            raise ConfigError(
                f"--max-num-batched-tokens ({budget}) must be at least --max-num-seqs ({seats}): a step holds one "
                "token of every running request"
            )
        self._check_scheduled(seats)
        if self.tbt_target_milliseconds is not None and self.tbt_target_milliseconds <= 0:
            raise ConfigError(f"--tbt-target-ms: expected a positive time, not {self.tbt_target_milliseconds:g}")
        if self.token_budget is TokenBudget.AUTO:
            if self.tbt_target_milliseconds is None:
                raise ConfigError("--max-num-batched-tokens auto needs --tbt-target-ms: the gap between tokens to keep")
            if self.enable_chunked_prefill is False or not self.batching.cuts_prompts:
                raise ConfigError("--max-num-batched-tokens auto needs chunked prefill: it chooses the size of chunks")
        if self.enable_chunked_prefill and not self.batching.cuts_prompts:
            raise ConfigError(f"--enable-chunked-prefill: --batching {self.batching} computes prompts whole")
        if self.max_model_len is not None and self.enable_chunked_prefill is False:
            self._check_whole("--no-enable-chunked-prefill", self.max_model_len)

    def _check_scheduled(self, seats: int | None) -> None:
        scheduled = self.max_num_scheduled_tokens
        if scheduled is not None and seats is not None and scheduled < seats:
            raise ConfigError(
                f"--max-num-scheduled-tokens ({scheduled}) must be at least --max-num-seqs ({seats}): a step holds one "
                "token of every running request"
            )

    def _check_whole(self, why: str, max_model_len: int) -> None:
        for option, budget in (
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-scheduled-tokens", self.max_num_scheduled_tokens),
        ):
            if budget is not None and budget < max_model_len:
                raise ConfigError(
                    f"{why} needs {option} ({budget}) to be at least --max-model-len ({max_model_len}), or a long "
                    "prompt could never be scheduled"
                )

    @property
    def served_model_name(self) -> str:
        return self.served_model_names[0]

    def kv_dtype(self, dtype: str) -> str:
        """How KV is kept beside a model of this precision."""
        return dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def advertised_host(self) -> str:
        """What peers connect to. Listening everywhere names no address, so then they are taken to be on this host."""
        return self.pod_ip or ("127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the options come to. `max_step_seconds`: see SchedulerConfig. `warnings`: one line each, for the log."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    chunked_prefill: bool
    swap_space_bytes: int
    max_step_seconds: float | None = None
    warnings: tuple[str, ...] = ()


def plan(config: EngineConfig, device: Device, max_model_len: int, can_chunk: bool = True) -> Plan:
    """`can_chunk`: the architecture computes the same from a prompt in parts. Raises ConfigError."""
    warnings: list[str] = []
    if config.long_prefill_token_threshold > max_model_len:
        raise ConfigError(
            f"--long-prefill-token-threshold ({config.long_prefill_token_threshold}) cannot be greater than "
            f"--max-model-len ({max_model_len})"
        )
    default_budget, default_seats = BATCH_DEFAULTS[device.row][config.usage]
    chunked = _chunked(config, max_model_len, can_chunk, warnings)
    budget = config.max_num_batched_tokens
    if budget is None:
        # Smaller where not even all seats together can fill it.
        budget = min(
            default_budget if chunked else max(default_budget, max_model_len),
            (config.max_num_seqs or default_seats) * max_model_len,
        )
    scheduled = config.max_num_scheduled_tokens
    seats = config.max_num_seqs
    if seats is None:
        seats = min(default_seats, budget, budget if scheduled is None else scheduled)
    if budget < seats:
        budget = seats  # only where --max-num-seqs was given and the other was not
    if scheduled is not None and scheduled > budget:
        warnings.append(
            f"--max-num-scheduled-tokens {scheduled} has no effect: steps have memory for {budget}, which "
            "--max-num-batched-tokens says"
        )
    if config.max_num_batched_tokens is not None:
        if budget > seats * max_model_len:
            warnings.append(
                f"--max-num-batched-tokens {budget} is more than --max-num-seqs × --max-model-len "
                f"({seats * max_model_len}) can fill"
            )
        if chunked and budget % TILE_TOKENS:
            warnings.append(
                f"--max-num-batched-tokens {budget} is no multiple of the tile of {TILE_TOKENS} tokens: the last tile "
                f"of a full step is computed for {budget % TILE_TOKENS} of them"
            )
    if device.kind == "cpu" and config.gpu_memory_utilization is not None:
        warnings.append(
            "--gpu-memory-utilization has no meaning on a CPU, whose memory others share: the KV cache takes "
            f"--kv-cache-mebibytes ({config.kv_cache_mebibytes or DEFAULT_KV_CACHE_MEBIBYTES})"
        )
    swap = config.swap_space_gibibytes
    if config.preemption_mode is PreemptionMode.SWAP and swap == 0:
        warnings.append("--preemption-mode swap has no --swap-space to swap to: preempted requests are recomputed")
    if swap is None:
        needs_it = device.kind != "cpu" or config.preemption_mode is PreemptionMode.SWAP
        swap = 4.0 if needs_it and config.preemption_mode is not PreemptionMode.RECOMPUTE else 0.0
    # Offline nobody waits beside a long prompt.
    served = device.kind == "cpu" and config.usage is Usage.SERVER
    paced = served and chunked and config.max_num_batched_tokens is None
    step_seconds = CPU_STEP_SECONDS if paced else None
    return Plan(max_model_len, budget, seats, chunked, int(swap * _GIB), step_seconds, tuple(warnings))


def _chunked(config: EngineConfig, max_model_len: int, can_chunk: bool, warnings: list[str]) -> bool:
    if not can_chunk:
        if config.enable_chunked_prefill:
            warnings.append("--enable-chunked-prefill: this architecture needs prompts whole; chunking is off")
        config._check_whole("This architecture computes prompts whole, which", max_model_len)
        return False
    if not config.batching.cuts_prompts:
        config._check_whole(f"--batching {config.batching} computes prompts whole, which", max_model_len)
        return False
    if config.enable_chunked_prefill is not None:
        if not config.enable_chunked_prefill:
            config._check_whole("--no-enable-chunked-prefill", max_model_len)
        return config.enable_chunked_prefill
    if config.usage is Usage.SERVER or config.token_budget is TokenBudget.AUTO:
        return True
    # Nobody watches a stream offline: whole prompts make the largest products. A budget that cannot hold one says that
    # chunks are meant.
    budgets = config.max_num_batched_tokens or LARGEST_STEP_TOKENS, config.max_num_scheduled_tokens
    return max_model_len > min(budget for budget in budgets if budget is not None)


def dtype_on(config: EngineConfig, device: Device, stored: str) -> str:
    """The precision to compute in; `stored`: that of the model's files. On a GPU `auto` is that, but bfloat16 for
    float32, as vLLM has it. On a CPU it is float32, which every CPU is quick at: KV goes only between machines of one
    precision, and a pool may be of several kinds of CPU. Raises ConfigError, also for a precision of KV."""
    if config.kv_cache_dtype == "fp8":
        if device.kind == "cpu":
            raise ConfigError("--kv-cache-dtype: fp8 needs a GPU; on a CPU KV has the precision of the model")
        if device.capability < FP8_CAPABILITY:
            raise ConfigError(
                f"--kv-cache-dtype: fp8 needs a GPU of compute capability {FP8_CAPABILITY / 10} or later; "
                f"{device.name} has {device.capability / 10}"
            )
    if device.kind == "cpu" and config.dtype == "float16":
        raise ConfigError("--dtype: float16 is not supported on a CPU; use float32 or bfloat16")
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.kind == "cpu" else "bfloat16" if stored == "float32" else stored


def from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, object]:
    """The fields of EngineConfig that the pod's environment gives. Raises ConfigError.

    Without a pool key one is drawn: nobody else knows it, so the admin and KV ports of such an engine refuse everyone.
    """
    role_text = environment.get(names.ENV_ROLE, "")
    if role_text and role_text not in [role.value for role in Role]:
        raise ConfigError(f"{names.ENV_ROLE}: expected one of prompt, token, mixed, not {role_text!r}")
    epoch_text = environment.get(names.ENV_ROLE_EPOCH, "") or "0"
    if not epoch_text.isdecimal():
        raise ConfigError(f"{names.ENV_ROLE_EPOCH}: expected a non-negative integer, not {epoch_text!r}")
    key_text = environment.get(names.ENV_POOL_KEY, "")
    try:
        pool_key = keys.parse_key(key_text) if key_text else secrets.token_bytes(32)
    except ValueError as error:
        raise ConfigError(f"{names.ENV_POOL_KEY}: {error}") from error
    api_key = environment.get(names.ENV_API_KEY, "")
    return {
        "role": Role(role_text) if role_text else None,
        "role_epoch": int(epoch_text),
        "pod_uid": environment.get(names.ENV_POD_UID, "") or f"local-{secrets.token_hex(8)}",
        "pod_ip": environment.get(names.ENV_POD_IP, ""),
        "pool": environment.get(names.ENV_POOL, ""),
        "pool_namespace": environment.get(names.ENV_POOL_NAMESPACE, ""),
        "pool_key": pool_key,
        "api_keys": (api_key,) if api_key else (),
    }
