"""What an engine process was told, once, as one frozen value; every refusal names the option.

Owns the options and the environment of the pod; knows neither the model's files nor the server.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from poolwright_protocol import keys, names
from poolwright_protocol.roles import Role

DTYPES = ("float32", "bfloat16")
# A kubelet grants 30 s by default; what is cut off must still be told so within them.
DEFAULT_SHUTDOWN_SECONDS = 20.0


class ConfigError(ValueError):
    """The text is one line, for a person, and names the option or variable."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`role` None: acts as mixed, has no PUT role, and accepts any. `cpu_threads` None: torch's choice."""

    model: Path
    served_model_name: str
    host: str = "0.0.0.0"
    port: int = names.API_PORT
    admin_port: int = names.ADMIN_PORT
    kv_port: int = names.KV_PORT
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    block_size: int = 16
    kv_cache_mebibytes: int = 512
    max_model_len: int | None = None
    dtype: str = "float32"
    enable_chunked_prefill: bool = True
    cpu_threads: int | None = None
    cpu_duty_percent: int = 100
    shutdown_timeout_seconds: float = DEFAULT_SHUTDOWN_SECONDS
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
        if not self.served_model_name:
            raise ConfigError("--served-model-name: expected a name, not an empty string")
        for option, port in (("--port", self.port), ("--admin-port", self.admin_port), ("--kv-port", self.kv_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{option}: expected a port from 0 to 65535, not {port}")
        ports = [port for port in (self.port, self.admin_port, self.kv_port) if port]
        if len(ports) != len(set(ports)):
            raise ConfigError("--port, --admin-port and --kv-port must differ")
        for option, count in (
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
            ("--block-size", self.block_size),
            ("--kv-cache-mebibytes", self.kv_cache_mebibytes),
            ("--max-model-len", self.max_model_len),
            ("--cpu-threads", self.cpu_threads),
        ):
            if count is not None and count < 1:
                raise ConfigError(f"{option}: expected a positive integer, not {count}")
        for option, size in (
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
            ("--data-parallel-size", self.data_parallel_size),
        ):
            if size != 1:
                raise ConfigError(f"{option}: {size} is not supported; this engine runs on one device (1)")
        if not 1 <= self.cpu_duty_percent <= 100:
            raise ConfigError(f"--cpu-duty-percent: expected 1 to 100, not {self.cpu_duty_percent}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype: {self.dtype!r} is not supported; expected one of {', '.join(DTYPES)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): a step holds one token of every running request"
            )
        if self.shutdown_timeout_seconds < 0:
            raise ConfigError(f"--shutdown-timeout: expected 0 or more seconds, not {self.shutdown_timeout_seconds}")
        if self.role_epoch < 0:
            raise ConfigError(f"{names.ENV_ROLE_EPOCH}: expected a non-negative integer, not {self.role_epoch}")
        if self.max_model_len is not None:
            self.check_model_len(self.max_model_len)

    def check_model_len(self, max_model_len: int) -> None:
        """Once the model's own length is known. Raises ConfigError."""
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"--no-enable-chunked-prefill needs --max-num-batched-tokens ({self.max_num_batched_tokens}) to be at "
                f"least --max-model-len ({max_model_len}), or a long prompt could never be scheduled"
            )

    @property
    def advertised_host(self) -> str:
        """What peers connect to. Listening everywhere names no address, so then they are taken to be on this host."""
        return self.pod_ip or ("127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host)


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
    return {
        "role": Role(role_text) if role_text else None,
        "role_epoch": int(epoch_text),
        "pod_uid": environment.get(names.ENV_POD_UID, "") or f"local-{secrets.token_hex(8)}",
        "pod_ip": environment.get(names.ENV_POD_IP, ""),
        "pool": environment.get(names.ENV_POOL, ""),
        "pool_namespace": environment.get(names.ENV_POOL_NAMESPACE, ""),
        "pool_key": pool_key,
    }
