"""From options to a running engine: the model read, the cache sized, the first token made.

The only module that knows every part. Imported late, since it brings torch; `load` takes seconds and blocks.
"""

import hashlib
import logging
from dataclasses import dataclass

from poolwright_engine.config import ConfigError, EngineConfig
from poolwright_engine.cpu_runner import CpuRunner
from poolwright_engine.handoff import HandoffConfig, KvExchange
from poolwright_engine.loader import LoadedModel, LoadError, load_model
from poolwright_engine.loop import EngineLoop, Identity, LoopConfig
from poolwright_engine.observer import Observer
from poolwright_engine.runner import Row, Step
from poolwright_engine.sequence import SamplingParams
from poolwright_engine.tokenizer import Tokenizer
from poolwright_protocol.kv import KVShape

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """A model that has made its first token. `fingerprint` is equal where KV may be exchanged."""

    runner: CpuRunner
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    max_chars_per_token: int
    fingerprint: str


def load(config: EngineConfig) -> Parts:
    """Raises ConfigError: a model that cannot be served with these options, in one line."""
    try:
        loaded = load_model(config.model, config.dtype)
    except LoadError as error:
        raise ConfigError(str(error)) from error
    kv_shape = loaded.config.kv_shape(loaded.model.dtype)
    num_blocks = kv_shape.blocks_in(config.kv_cache_mebibytes * 2**20, config.block_size)
    max_model_len = _max_model_len(config, loaded.config.context_length, kv_shape, num_blocks)
    config.check_model_len(max_model_len)
    runner = CpuRunner(
        loaded.model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        cpu_threads=config.cpu_threads,
        duty_percent=config.cpu_duty_percent,
    )
    _first_token(runner)
    return Parts(
        runner,
        loaded.tokenizer,
        loaded.config.vocab_size,
        max_model_len,
        max(len(loaded.tokenizer.token_text(i)) for i in range(loaded.tokenizer.vocab_size)),
        _fingerprint(loaded, config.block_size),
    )


def engine_loop(config: EngineConfig, parts: Parts, observer: Observer | None = None) -> EngineLoop:
    return EngineLoop(
        parts.runner,
        config=LoopConfig(
            max_model_len=parts.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            chunked_prefill=config.enable_chunked_prefill,
        ),
        identity=Identity(pod_uid=config.pod_uid, role=config.role, role_epoch=config.role_epoch),
        eos_token_ids=parts.tokenizer.eos_ids,
        observer=observer,
    )


def kv_exchange(config: EngineConfig, parts: Parts, engine: EngineLoop) -> KvExchange:
    return KvExchange(
        engine,
        HandoffConfig(
            pool_key=config.pool_key,
            pod_uid=config.pod_uid,
            advertise_host=config.advertised_host,
            listen_host=config.host,
            listen_port=config.kv_port,
            model_fingerprint=parts.fingerprint,
        ),
    )


def _max_model_len(config: EngineConfig, context_length: int, kv_shape: KVShape, num_blocks: int) -> int:
    """What was asked for, or the model's own length as far as the cache holds one such request."""
    capacity = (num_blocks - 1) * config.block_size  # block 0 is the null block
    if capacity < config.block_size:
        raise ConfigError(
            f"--kv-cache-mebibytes: {config.kv_cache_mebibytes} MiB hold no block of {config.block_size} tokens "
            f"({kv_shape.bytes_per_token} bytes each)"
        )
    asked = config.max_model_len
    if asked is None:
        return min(context_length, capacity)
    if asked > context_length:
        raise ConfigError(f"--max-model-len: {asked} is more than the {context_length} tokens of the model")
    if asked > capacity:
        raise ConfigError(
            f"--max-model-len: {asked} is more than the {capacity} tokens that --kv-cache-mebibytes "
            f"{config.kv_cache_mebibytes} holds"
        )
    return asked


def _first_token(runner: CpuRunner) -> None:
    """A machine that cannot make one token must not become ready. What it leaves in block 1 is overwritten by use."""
    row = Row(
        slot=0,
        start=0,
        length=1,
        token_ids=(0,),
        block_ids=(1,),
        samples=True,
        params=SamplingParams(max_tokens=1, temperature=0.0),
    )
    runner.submit(Step(number=0, rows=(row,))).result()


def _fingerprint(loaded: LoadedModel, block_size: int) -> str:
    """Of the weights' shape, their precision and the files' sizes: reading gigabytes again would double the start."""
    files = [loaded.path] if loaded.path.is_file() else sorted(loaded.path.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    return hashlib.sha256(repr((loaded.config, loaded.dtype, sizes, block_size)).encode()).hexdigest()
