"""From options to a running engine: the model found and read, the cache sized, the first token made.

The only module that knows every part. Imported late, since it brings torch; `load` takes seconds and blocks.
"""

import hashlib
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from poolwright_engine.api.api_error import brief
from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.api.sampling_options import NEUTRAL, SamplingDefaults, draw_seeds_from
from poolwright_engine.checkpoint.architectures import family_of_folder
from poolwright_engine.checkpoint.loader import LoadedModel, LoadError, MakeLinear, load_model, stored_dtype
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.cuda.graphs import NO_GRAPHS, graph_sizes
from poolwright_engine.cuda.model import CudaModel
from poolwright_engine.cuda.runner import CudaRunner, measured_cache_bytes
from poolwright_engine.handoff.exchange import HandoffConfig, KvExchange
from poolwright_engine.loop.engine_loop import EngineLoop, Identity, LoopConfig
from poolwright_engine.loop.observer import Observer
from poolwright_engine.model.linear import Quantization, quantized
from poolwright_engine.model.model_config import ModelConfig
from poolwright_engine.native.library import CpuOperations, NoLibrary, is_native
from poolwright_engine.process import source
from poolwright_engine.process.config import (
    DEFAULT_KV_CACHE_MEBIBYTES,
    TILE_TOKENS,
    ConfigError,
    Device,
    EngineConfig,
    Plan,
    Usage,
    dtype_on,
    plan,
)
from poolwright_engine.process.first_steps import Shape, measure_first, measure_swap
from poolwright_engine.process.generation_config import OPTION, Found, sampling_defaults, unused
from poolwright_engine.process.passing import in_passing
from poolwright_engine.process.progress import download_bar
from poolwright_engine.process.step_profile import read_step_profile
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.runner import ModelRunner, Row, Step
from poolwright_engine.scheduling.scheduler_config import GUESSED_SWAP_BYTES_PER_SECOND
from poolwright_engine.scheduling.sequence import SamplingParams
from poolwright_engine.scheduling.step_times import StepTimes
from poolwright_engine.text.tokenizer import Tokenizer, TokenizerUnsupported
from poolwright_kernels.jit import available as triton_is_there
from poolwright_protocol.kv import KVShape, blocks_for
from poolwright_protocol.step_time import StepProfile

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

_LOG_SECONDS = 10.0
_GPU_SHARE = 0.92


@dataclass(frozen=True, slots=True)
class Parts:
    """A model that has made its first token. `fingerprint` is equal where KV may be exchanged."""

    runner: ModelRunner
    tokenizer: Tokenizer
    vocab_size: int
    max_chars_per_token: int
    fingerprint: str
    guides: Guides
    plan: Plan
    model: ModelConfig
    dtype: str
    step_profile: StepProfile | None
    prompt_token_seconds: float | None = None  # measured where the plan paces steps
    first_steps: tuple[tuple[Shape, float], ...] = ()  # seconds of each; none where a profile was given
    swap_bytes_per_second: float | None = None  # measured; None: nothing to swap to
    sampling_defaults: SamplingDefaults = NEUTRAL

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len


def load(config: EngineConfig, fetching: source.Progress | None = None) -> Parts:
    """Raises ConfigError: a model that cannot be served with these options, in one line."""
    return in_passing(_load, config, fetching)


def _load(config: EngineConfig, fetching: source.Progress | None) -> Parts:
    device = device_of(config)
    dtype_on(config, device, stored="float32")  # what cannot be is refused before anything is fetched
    sampling_defaults(config, None)
    step_profile = _step_profile(config)
    computing = _operations(config, device)
    cache = Path(config.download_dir) if config.download_dir else None
    path = source.locate(config.model, config.revision, cache, _can_serve, fetching)
    sampling = sampling_defaults(config, path)
    try:
        dtype = dtype_on(config, device, stored_dtype(path))
        loaded = load_model(
            path,
            dtype,
            progress=_logged_reading(),
            make_linear=_make_linear(config, computing),
            cpu_operations=computing,
            batch_invariant=config.batch_invariant,
        )
        tokenizer = _tokenizer(config, loaded.tokenizer)
    except (LoadError, TokenizerUnsupported) as error:
        raise ConfigError(str(error)) from error
    draw_seeds_from(config.seed)
    guides = Guides(tokenizer, loaded.config.vocab_size)
    make = _on_cpu if device.kind == "cpu" else _on_gpu
    runner, planned = make(config, device, loaded, tokenizer, guides)
    for warning in planned.warnings:
        log.warning(warning)
    _log_sampling(config, sampling)
    _first_token(runner)
    token_seconds = None if planned.max_step_seconds is None else _prompt_token_seconds(runner, planned)
    first_steps: tuple[tuple[Shape, float], ...] = ()
    if step_profile is None and config.usage is Usage.SERVER:  # offline, nobody asks
        first_steps = measure_first(runner, planned.max_num_batched_tokens, planned.max_num_seqs, planned.max_model_len)
    return Parts(
        runner,
        tokenizer,
        loaded.config.vocab_size,
        max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size)),
        _fingerprint(loaded, config.block_size, config.quantization, config.kv_dtype(dtype)),
        guides,
        planned,
        loaded.config,
        dtype,
        step_profile,
        token_seconds,
        first_steps,
        measure_swap(runner),
        sampling.defaults.within(planned.max_model_len),
    )


def device_of(config: EngineConfig) -> Device:
    """What `--device` comes to on this machine. Raises ConfigError."""
    available = torch.cuda.is_available() and triton_is_there
    if config.device == "cpu" or (config.device == "auto" and not available):
        return Device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device: cuda was asked for, and PyTorch finds no GPU here")
    if not triton_is_there:
        raise ConfigError("--device: cuda needs Triton, which is not installed")
    for option, given, default in (
        ("--quantization", config.quantization, "none"),
        ("--batch-invariant", config.batch_invariant, False),
        ("--cpu-duty-percent", config.cpu_duty_percent, 100),
        ("--cpu-operations", config.cpu_operations, "auto"),
    ):
        if given != default:
            raise ConfigError(f"{option}: {given} is not supported on a GPU; use --device cpu")
    if config.block_size & (config.block_size - 1):
        raise ConfigError(f"--block-size: on a GPU a power of 2 is needed, not {config.block_size}")
    properties = torch.cuda.get_device_properties(0)
    return Device("cuda", properties.name, properties.total_memory, 10 * properties.major + properties.minor)


def _on_gpu(
    config: EngineConfig,
    device: Device,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    guides: Guides,
    measure: Callable[..., int] = measured_cache_bytes,
) -> tuple[ModelRunner, Plan]:
    """The cache takes what a step of the largest size leaves of the share. Raises ConfigError."""
    cache_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else loaded.model.dtype
    kv_shape = loaded.config.kv_shape(cache_dtype)
    longest = config.max_model_len or loaded.config.context_length
    planned = plan(config, device, longest)
    model = CudaModel(loaded.config, loaded.model.weights, longest, torch.device(device.kind))
    share = config.gpu_memory_utilization or _GPU_SHARE
    sizes = (config.block_size, planned.max_num_seqs, planned.max_num_batched_tokens, longest)
    left = measure(model, *sizes, share, cache_dtype)
    what = f"--gpu-memory-utilization: {share:g} of {device.name or device.kind} leaves {max(0, left) >> 20} MiB, which"
    if config.kv_cache_mebibytes is not None:
        asked = config.kv_cache_mebibytes << 20
        if asked > left:
            raise ConfigError(f"--kv-cache-mebibytes: {config.kv_cache_mebibytes} MiB do not fit; {what} is the most")
        left, what = asked, f"--kv-cache-mebibytes: {config.kv_cache_mebibytes} MiB"
    num_blocks = kv_shape.blocks_in(max(0, left), config.block_size)
    max_model_len = _max_model_len(config, loaded.config.context_length, kv_shape, num_blocks, what)
    planned = plan(config, device, max_model_len)
    runner = _allocated(
        CudaRunner,
        num_blocks * config.block_size * kv_shape.bytes_per_token + planned.swap_space_bytes,
        model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=planned.max_num_seqs,
        max_num_batched_tokens=planned.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_host_blocks=kv_shape.blocks_in(planned.swap_space_bytes, config.block_size),
        eos_token_ids=tokenizer.eos_ids,
        guides=guides,
        sizes=NO_GRAPHS if config.enforce_eager else graph_sizes(planned.max_num_seqs, planned.max_num_batched_tokens),
        cache_dtype=cache_dtype,
    )
    return runner, planned


def _on_cpu(
    config: EngineConfig, device: Device, loaded: LoadedModel, tokenizer: Tokenizer, guides: Guides
) -> tuple[ModelRunner, Plan]:
    """Raises ConfigError."""
    kv_shape = loaded.config.kv_shape(loaded.model.dtype)
    mebibytes = config.kv_cache_mebibytes or DEFAULT_KV_CACHE_MEBIBYTES
    num_blocks = kv_shape.blocks_in(mebibytes << 20, config.block_size)
    what = f"--kv-cache-mebibytes: {mebibytes} MiB"
    max_model_len = _max_model_len(config, loaded.config.context_length, kv_shape, num_blocks, what)
    planned = plan(config, device, max_model_len)
    needed = num_blocks * config.block_size * kv_shape.bytes_per_token + planned.swap_space_bytes
    runner = _allocated(
        CpuRunner,
        needed,
        loaded.model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=planned.max_num_seqs,
        cpu_threads=config.cpu_threads,
        duty_percent=config.cpu_duty_percent,
        num_host_blocks=kv_shape.blocks_in(planned.swap_space_bytes, config.block_size),
        eos_token_ids=tokenizer.eos_ids,
        guides=guides,
    )
    # A measured form may differ from one start to the next, and with it how sums are rounded.
    measured = config.cpu_linear_form == "auto" and config.batch_invariant
    runner.choose_forms("rows" if measured else config.cpu_linear_form)
    return runner, planned


def _allocated(make: Callable[P, R], needed_bytes: int, *arguments: P.args, **options: P.kwargs) -> R:
    """The runner, with its caches. Raises ConfigError."""
    try:
        return make(*arguments, **options)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # PyTorch's CPU allocator has no class of its own for it.
        if type(error) is RuntimeError and "memory" not in str(error).lower():
            raise
        raise ConfigError(
            f"--kv-cache-mebibytes, --swap-space: this machine has no {source.size(needed_bytes)} of memory for KV"
        ) from error


def _step_profile(config: EngineConfig) -> StepProfile | None:
    return None if config.step_profile is None else read_step_profile(Path(config.step_profile))


def _operations(config: EngineConfig, device: Device) -> CpuOperations:
    """NATIVE or TORCH. A library is compiled now where there is none, before a model is fetched. Raises ConfigError."""
    if device.kind != "cpu":
        return CpuOperations.TORCH
    try:
        return CpuOperations.NATIVE if is_native(CpuOperations(config.cpu_operations)) else CpuOperations.TORCH
    except NoLibrary as error:
        raise ConfigError(f"--cpu-operations: native was asked for, and there is no library: {error}") from error


def _make_linear(config: EngineConfig, computing: CpuOperations) -> MakeLinear | None:
    if config.quantization == "none":
        return None
    return partial(quantized, Quantization(config.quantization), computing)


def engine_loop(config: EngineConfig, parts: Parts, observer: Observer | None = None) -> EngineLoop:
    target = config.tbt_target_milliseconds
    return EngineLoop(
        parts.runner,
        config=LoopConfig(
            max_model_len=parts.max_model_len,
            max_num_batched_tokens=parts.plan.max_num_batched_tokens,
            max_num_scheduled_tokens=config.max_num_scheduled_tokens,
            max_num_seqs=parts.plan.max_num_seqs,
            max_waiting=config.max_num_queued,
            chunked_prefill=parts.plan.chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            batching=config.batching,
            scheduling_policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching,
            model_identity=parts.fingerprint,
            watermark=config.watermark,
            preemption=config.preemption_mode,
            swap_bytes_per_second=parts.swap_bytes_per_second or GUESSED_SWAP_BYTES_PER_SECOND,
            token_budget=config.token_budget,
            tbt_target_seconds=None if target is None else target / 1000,
            tbt_deadlines=config.tbt_deadlines,
            quick_first_tokens=_quick_first_tokens(config),
            tile_tokens=TILE_TOKENS,
            step_profile=parts.step_profile,
            max_step_seconds=parts.plan.max_step_seconds,
            prompt_token_seconds=parts.prompt_token_seconds,
            static_batch_size=config.static_batch_size,
            static_window_seconds=config.static_window_milliseconds / 1000,
            speculative_ngram_tokens=config.num_speculative_tokens,
        ),
        identity=Identity(pod_uid=config.pod_uid, role=config.role, role_epoch=config.role_epoch),
        eos_token_ids=parts.tokenizer.eos_ids,
        observer=observer,
        step_times=_step_times(parts),
    )


def _quick_first_tokens(config: EngineConfig) -> bool:
    """In a pool, whose targets are percentiles near what its machines can do, full steps keep more of them."""
    if config.quick_first_tokens is not None:
        return config.quick_first_tokens and config.usage is Usage.SERVER
    return config.usage is Usage.SERVER and config.role is None


def _step_times(parts: Parts) -> StepTimes:
    times = StepTimes()
    if parts.step_profile is not None:
        times.begin_with_profile(parts.step_profile)
    for shape, seconds in parts.first_steps:
        times.begin_with(shape.work, seconds)
    return times


@dataclass(frozen=True, slots=True)
class Running:
    """An engine without ports, for one process's own requests. It refuses none: who asks bounds itself, best to
    `at_once` requests, which keep all seats taken."""

    parts: Parts
    engine: EngineLoop
    metrics: EngineMetrics

    @property
    def at_once(self) -> int:
        return 2 * self.parts.plan.max_num_seqs


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[Running]:
    """Raises ConfigError. Loading blocks: nobody else is on this event loop yet."""
    with download_bar() as fetching:
        parts = load(config, fetching)
    metrics = EngineMetrics(config.served_model_name, config.pool, config.pool_namespace, config.pod_uid)
    engine = engine_loop(replace(config, max_num_queued=sys.maxsize), parts, metrics)
    await engine.start()
    try:
        yield Running(parts, engine, metrics)
    finally:
        await engine.close()


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


def _can_serve(config_json: Path) -> None:
    """Before the weights are fetched. Raises ConfigError."""
    try:
        architecture = json.loads(config_json.read_text(encoding="utf-8"))["architectures"][0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"--model: {config_json} does not say what architecture it is of") from error
    try:
        family_of_folder(config_json.parent, str(architecture))
    except LoadError as error:
        raise ConfigError(str(error)) from error


def _tokenizer(config: EngineConfig, own: Tokenizer) -> Tokenizer:
    """With the template that was asked for. Raises ConfigError."""
    given = config.chat_template
    if given is None:
        return own
    if not any(mark in given for mark in "{}\n"):  # a path, since a template has at least one of them
        try:
            given = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template: {given} cannot be read: {error}") from error
    try:
        return own.with_chat_template(given)
    except TokenizerUnsupported as error:
        raise ConfigError(f"--chat-template: {error}") from error


def _log_sampling(config: EngineConfig, found: Found) -> None:
    """A warning where the model's files decide, as in vLLM: few expect it."""
    for name in unused(config):
        log.warning("--override-generation-config: %s has no effect; it is no default of sampling", brief(name))
    if found.defaults != NEUTRAL:
        log.log(
            logging.INFO if found.sources == (OPTION,) else logging.WARNING,
            "Took defaults of sampling %s from=%s; --generation-config vllm leaves out those of files",
            found.defaults,
            ",".join(found.sources),
        )


def _logged_reading() -> source.Progress:
    last = time.monotonic()

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            log.info("Read the weights done=%s total=%s", source.size(done_bytes), source.size(total_bytes))

    return report


def _max_model_len(config: EngineConfig, context_length: int, kv_shape: KVShape, num_blocks: int, what: str) -> int:
    """What was asked for, or the model's own length as far as the cache holds one such request. `what`: the option that
    sized the cache, and how large it is."""
    capacity = (num_blocks - 1) * config.block_size  # block 0 is the null block
    if capacity < config.block_size:
        raise ConfigError(f"{what} hold no block of {config.block_size} tokens ({kv_shape.bytes_per_token} bytes each)")
    asked = config.max_model_len
    if asked is None:
        return min(context_length, capacity)
    if asked > context_length:
        raise ConfigError(f"--max-model-len: {asked} is more than the {context_length} tokens of the model")
    if asked > capacity:
        raise ConfigError(
            f"--max-model-len: {asked} is more than the {capacity} tokens that the KV cache holds ({what})"
        )
    return asked


def _first_token(runner: ModelRunner, length: int = 1) -> float:
    """And the seconds it took after a prompt of `length`. A machine that cannot make one token must not become ready.
    What it leaves in the blocks from 1 on is overwritten by use."""
    row = Row(
        slot=0,
        length=length,
        token_ids=(0,) * length,
        block_ids=tuple(range(1, 1 + blocks_for(length, runner.block_size))),
        samples=True,
        params=SamplingParams(max_tokens=1, temperature=0.0),
    )
    return runner.submit(Step(number=0, rows=(row,), starts=(0,))).result().busy_seconds


def _prompt_token_seconds(runner: ModelRunner, planned: Plan) -> float:
    length = min(TILE_TOKENS, planned.max_model_len, (runner.num_blocks - 1) * runner.block_size)
    return _first_token(runner, length) / length


def _fingerprint(loaded: LoadedModel, block_size: int, quantization: str, kv_dtype: str) -> str:
    """Of the weights and their shape, their precision and that of KV: whatever a token's KV comes from."""
    facts = (loaded.config, loaded.weights_digest, loaded.dtype, quantization, block_size, kv_dtype)
    return hashlib.sha256(repr(facts).encode()).hexdigest()
