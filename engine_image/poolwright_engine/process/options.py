"""The options of an engine, as a person writes them: on the command line, or as keywords of `LLM`.

Owns their names (vLLM's, where it has one for the thing), their help, and what is said of those that have no effect
here. What the values come to is `config`'s.
"""

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

from poolwright_engine.process.config import (
    BATCH_DEFAULTS,
    CPU_LINEAR_FORMS,
    CPU_OPERATIONS,
    CPU_STEP_SECONDS,
    DEFAULT_KV_CACHE_MEBIBYTES,
    DEFAULT_SHUTDOWN_SECONDS,
    DEFAULT_STALL_EXIT_SECONDS,
    DEFAULT_STALL_SECONDS,
    DEVICES,
    DTYPES,
    GENERATION_CONFIG_OF_MODEL,
    KV_CACHE_DTYPES,
    LARGEST_STEP_TOKENS,
    QUANTIZATIONS,
    TILE_TOKENS,
    ConfigError,
    EngineConfig,
    Usage,
    from_environment,
)
from poolwright_engine.process.source import name_of
from poolwright_engine.scheduling.scheduler_config import (
    Batching,
    PreemptionMode,
    SchedulingPolicy,
    TbtDeadlines,
    TokenBudget,
)
from poolwright_protocol import names

E = TypeVar("E", bound=StrEnum)

# Flags of vLLM that a command line copied from it may hold: accepted, with a warning. Not here: flags whose absence
# would change answers or expose what they protect. Those are unknown, and so refused.
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "vLLM removed it": (
        "--disable-async-output-proc",
        "--disable-cascade-attn",
        "--disable-frontend-multiprocessing",
        "--disable-log-requests",
        "--engine-use-ray",
        "--multi-step-stream-outputs",
        "--use-v2-block-manager",
        "--worker-use-ray",
        "--guided-decoding-backend VALUE",
        "--max-context-len-to-capture VALUE",
        "--max-long-partial-prefills VALUE",
        "--max-num-partial-prefills VALUE",
        "--max-seq-len-to-capture VALUE",
        "--num-lookahead-slots VALUE",
        "--num-scheduler-steps VALUE",
        "--scheduler-delay-factor VALUE",
        "--tokenizer-pool-size VALUE",
        "--tokenizer-pool-type VALUE",
    ),
    "the loop always schedules a step ahead": ("--async-scheduling",),
    "code that comes with a model is never run": ("--trust-remote-code",),
    "nothing is compiled, and the graphs of a GPU have sizes of their own; see --enforce-eager": (
        "--compilation-config VALUE",
        "--cudagraph-capture-sizes VALUE",
        "--max-cudagraph-capture-size VALUE",
        "--optimization-level VALUE",
    ),
    "the engine runs in one process, on one device": (
        "--api-server-count VALUE",
        "--distributed-executor-backend VALUE",
        "--max-parallel-loading-workers VALUE",
        "--disable-custom-all-reduce",
    ),
    "requests are not logged; see --log-level": (
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--enable-log-requests",
        "--max-log-len VALUE",
        "--uvicorn-log-level VALUE",
    ),
    "it is always on": (
        "--enable-auto-tool-choice",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
    ),
    "there is one way to do it here": (
        "--attention-backend VALUE",
        "--block-hash-algo VALUE",
        "--prefix-caching-hash-algo VALUE",
        "--tokenizer-mode VALUE",
        "--tool-call-parser VALUE",
        "--disable-fastapi-docs",
        "--use-tqdm-on-load",
    ),
}
_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_MULTIPLES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def count(text: str) -> int:
    """An integer as vLLM takes it: 1k is 1000, 1K is 1024, 25.6k is 25600."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if found is None:
        try:
            return int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected an integer such as 512, 1k or 1K, not {text!r}") from error
    number, suffix = found.groups()
    if suffix in _MULTIPLES:
        return int(float(number) * _MULTIPLES[suffix])
    if "." in number:
        raise argparse.ArgumentTypeError(f"{text!r}: {suffix} is a power of two, of which there are no parts")
    return int(number) * _BINARY_MULTIPLES[suffix]


def count_or_auto(text: str) -> int | None:
    """None: auto."""
    return None if text.strip().lower() in ("auto", "-1") else count(text)


def _budget(text: str) -> int | TokenBudget:
    return TokenBudget.AUTO if text.strip().lower() == "auto" else count(text)


def _one_of(kind: type[E]) -> Callable[[str], E]:
    def parse(text: str) -> E:
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(kind)}, not {text!r}") from error

    return parse


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, not {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, not {text!r}")
    return value


def _mebibytes(text: str) -> int:
    return count(text) // 2**20


class Parser(argparse.ArgumentParser):
    """Takes `--max_model_len` for `--max-model-len`, takes no abbreviations, and a guess at what was meant comes with
    the refusal of an unknown flag."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        return super().parse_known_args(None if args is None else [_dashed(word) for word in args], namespace)

    def flags(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Ends the process where a word is left over."""
        if not words:
            return
        word = next((word for word in words if word.startswith("-")), None)
        if word is None:
            self.error(f"unexpected {words[0]!r}")
        flag = word.split("=")[0]
        near = difflib.get_close_matches(flag, list(self.flags()), n=1, cutoff=0.7)
        self.error(f"unknown option {flag}" + (f"; did you mean {near[0]}?" if near else ""))


def _dashed(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


class _WithoutEffect(argparse.Action):
    """Collects flags that mean nothing here in `without_effect` of the namespace."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        namespace.without_effect = [*(getattr(namespace, "without_effect", None) or ()), option_string]


def flags_without_effect() -> Mapping[str, str]:
    """Each with the reason."""
    return {flag.split()[0]: why for why, flags in WITHOUT_EFFECT.items() for flag in flags}


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder of safetensors, a .gguf file, or a repository of the Hugging Face Hub: ORG/NAME, "
        "ORG/NAME:QUANTIZATION or ORG/NAME/FILE.gguf; may also stand alone, without --model",
    )
    group.add_argument(
        "--served-model-name",
        dest="served_model_names",
        nargs="+",
        metavar="NAME",
        help="what clients may call the model; answers carry the first (default: the path's name, or ORG/NAME)",
    )
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the repository (default: main)")
    group.add_argument(
        "--download-dir", metavar="PATH", help="where models of the Hub are kept (default: HF_HOME's cache)"
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="|".join(DEVICES),
        help="auto: a GPU where PyTorch finds one, else the CPU (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        metavar="|".join(DTYPES),
        help="precision of weights and KV; auto: float32 on a CPU, so that all machines of a pool can exchange KV, and "
        "on a GPU the model's own, but bfloat16 for float32 or a GGUF file; no float16 on a CPU (default: %(default)s)",
    )
    group.add_argument(
        "-q",
        "--quantization",
        default="none",
        metavar="|".join(QUANTIZATIONS),
        help="hold weights in fewer bits, on a CPU (default: %(default)s)",
    )
    group.add_argument(
        "--chat-template", metavar="PATH|TEXT", help="instead of the model's own: a file, or the template itself"
    )
    group.add_argument(
        "--generation-config",
        default=GENERATION_CONFIG_OF_MODEL,
        metavar="auto|vllm|FOLDER",
        help="where defaults of sampling come from, for requests that do not say: the model's generation_config.json, "
        "nowhere, or that file of another folder, whose max_new_tokens then bounds every answer (default: %(default)s)",
    )
    group.add_argument(
        "--override-generation-config",
        type=_json_object,
        default={},
        metavar="JSON",
        help='such defaults, over those of --generation-config, as {"temperature": 0.6}; with max_new_tokens no answer '
        "is longer",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="of requests that bring none (default: one is drawn for each)"
    )
    group.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the same numbers for a request whatever else is in its step; slower (default: off)",
    )
    group.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="on a GPU: launch each kernel by itself instead of CUDA graphs of whole steps, which starts sooner, takes "
        "less memory and is slower; a CPU has no graphs (default: off)",
    )
    _add_scheduling(parser)
    _add_memory(parser)
    group = parser.add_argument_group("machine")
    group.add_argument("--cpu-threads", type=int, metavar="N", help="threads of a step (default: all cores)")
    group.add_argument(
        "--cpu-duty-percent",
        type=int,
        default=100,
        metavar="N",
        help="use at most this share of one core (default: %(default)s)",
    )
    group.add_argument(
        "--cpu-linear-form",
        default="auto",
        metavar="|".join(CPU_LINEAR_FORMS),
        help="how matrix products are made; auto: as this machine does them fastest, by 3 s of measuring at the "
        "start (default: %(default)s)",
    )
    group.add_argument(
        "--cpu-operations",
        default="auto",
        metavar="|".join(CPU_OPERATIONS),
        help="by what all else is computed, and products with 8-bit weights: a C library that this machine's compiler "
        "makes once (native), or PyTorch's operations (torch); auto: native where it can be (default: %(default)s)",
    )
    for kind in ("tensor", "pipeline", "data"):
        group.add_argument(
            f"--{kind}-parallel-size",
            f"-{kind[0]}p",
            type=int,
            default=1,
            metavar="1",
            help="only 1 is supported",
        )
    for spelled in (flag for flags in WITHOUT_EFFECT.values() for flag in flags):
        flag, _, value = spelled.partition(" ")
        forms = [flag] if value else [flag, f"--no-{flag[2:]}"]
        parser.add_argument(
            *forms, action=_WithoutEffect, nargs=1 if value else 0, dest="without_effect", help=argparse.SUPPRESS
        )


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    cpu = BATCH_DEFAULTS["CPU"]
    (server_tokens, server_seats), (offline_tokens, offline_seats) = cpu[Usage.SERVER], cpu[Usage.OFFLINE]
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--max-model-len",
        type=count_or_auto,
        metavar="N|auto",
        help="longest prompt and answer (default: auto, the model's, as far as the KV cache holds one)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_budget,
        metavar="N|auto",
        help=f"tokens of a step, best a multiple of {TILE_TOKENS}; auto: the most that keeps --tbt-target-ms "
        f"(default on a CPU: {server_tokens} serving, fewer where a step with prompts would take more than "
        f"{CPU_STEP_SECONDS:g} s, and {offline_tokens} offline; more on large GPUs)",
    )
    group.add_argument(
        "--max-num-scheduled-tokens",
        type=count,
        metavar="N",
        help="tokens that the scheduler puts into a step, where that is to be fewer than steps have memory for "
        "(default: --max-num-batched-tokens)",
    )
    group.add_argument(
        "--tbt-target-ms",
        dest="tbt_target_milliseconds",
        type=float,
        metavar="N",
        help="gap between two tokens of a stream that --max-num-batched-tokens auto keeps",
    )
    group.add_argument(
        "--quick-first-tokens",
        action=argparse.BooleanOptionalAction,
        help="prompts that come together share steps of the size that lets them wait least on average, rather than "
        "steps as large as the budget, which offline work has in any case (default: on, and off in a pool)",
    )
    group.add_argument(
        "--tbt-deadlines",
        type=_one_of(TbtDeadlines),
        choices=list(TbtDeadlines),
        default=TbtDeadlines.CUMULATIVE,
        help="how it counts gaps: cumulative, tokens that came early leave time to the next, which keeps the mean and "
        "most gaps; each, every gap by itself, for a target of nearly all gaps, as a P99 (default: %(default)s)",
    )
    group.add_argument(
        "--step-profile",
        metavar="FILE",
        help="what steps cost here, as `poolwright-engine profile --output FILE` wrote it: where "
        "--max-num-batched-tokens auto begins, and what the controller is told of this machine at first "
        "(default: a few steps are measured at the start)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=count,
        metavar="N",
        help=f"running requests (default on a CPU: {server_seats} serving, {offline_seats} offline)",
    )
    group.add_argument(
        "--max-num-queued-reqs",
        dest="max_num_queued",
        type=count,
        default=1024,
        metavar="N",
        help="requests that wait; more are refused with 429 (default: %(default)s)",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="split long prompts over steps (default: on serving; offline only for models longer than "
        f"{LARGEST_STEP_TOKENS} tokens)",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=count,
        default=0,
        metavar="N",
        help="most tokens of one prompt in a step while others wait, 0: no limit (default: %(default)s)",
    )
    group.add_argument(
        "--batching",
        type=_one_of(Batching),
        choices=list(Batching),
        default=Batching.SARATHI,
        help="how steps are formed (default: %(default)s: decodes first, then chunks of prompts)",
    )
    group.add_argument(
        "--scheduling-policy",
        type=_one_of(SchedulingPolicy),
        choices=list(SchedulingPolicy),
        default=SchedulingPolicy.FCFS,
        help="who comes first: by arrival, or by the requests' priority (default: %(default)s)",
    )
    group.add_argument(
        "--num-speculative-tokens",
        "--spec-tokens",
        type=count,
        default=0,
        metavar="N",
        help="tokens guessed for each stream from what it said before, 0: none (default: %(default)s)",
    )
    group.add_argument("--static-batch-size", type=count, metavar="N", help="of --batching static")
    group.add_argument(
        "--static-window-ms",
        dest="static_window_milliseconds",
        type=float,
        default=100.0,
        metavar="N",
        help="of --batching static: how long a batch waits to fill (default: %(default)g)",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--block-size",
        type=count,
        default=16,
        metavar="N",
        help="tokens per block, on a GPU a power of 2 (default: 16)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="|".join(KV_CACHE_DTYPES),
        help="precision of KV; auto: the model's; fp8: e4m3, which takes half the memory of 16 bits and costs some "
        "accuracy, on a GPU of compute capability 8.9 or later. Machines exchange KV only where they agree (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--kv-cache-mebibytes",
        type=int,
        metavar="N",
        help=f"size of the KV cache (default on a CPU: {DEFAULT_KV_CACHE_MEBIBYTES}; on a GPU what "
        "--gpu-memory-utilization leaves, which is also the most it may be)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        dest="kv_cache_mebibytes",
        type=_mebibytes,
        default=argparse.SUPPRESS,
        metavar="N",
        help="the same in bytes, as 512M",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of a GPU's memory for weights, steps and KV (default: 0.92); without effect on a CPU, whose memory "
        "others share",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV of prompts for those that begin alike (default: on)",
    )
    group.add_argument(
        "--preemption-mode",
        type=_one_of(PreemptionMode),
        choices=list(PreemptionMode),
        default=PreemptionMode.AUTO,
        help="what happens to a request whose blocks are needed (default: %(default)s, whichever costs less)",
    )
    group.add_argument(
        "--swap-space",
        dest="swap_space_gibibytes",
        type=float,
        metavar="GIB",
        help="host memory for preempted requests (default: 4 with a GPU; none on a CPU, where it would be the same "
        "memory as the KV cache, unless --preemption-mode is swap)",
    )
    group.add_argument(
        "--watermark",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of the blocks that an admission leaves free (default: %(default)g)",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=names.API_PORT, help="API port, 0: any (default: %(default)s)")
    group.add_argument(
        "--admin-port", type=int, default=names.ADMIN_PORT, help="roles, bearer token (default: %(default)s)"
    )
    group.add_argument(
        "--kv-port", type=int, default=names.KV_PORT, help="prefill requests and KV of peers (default: %(default)s)"
    )
    group.add_argument(
        "--api-key",
        dest="api_keys",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="KEY",
        help=f"clients of /v1 must bring one of them as a bearer token (default: {names.ENV_API_KEY}, else none)",
    )
    group.add_argument(
        "--sse-keep-alive-interval",
        dest="sse_keep_alive_seconds",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="a comment in a stream that is silent for so long, 0: none (default: %(default)g)",
    )
    group.add_argument(
        "--shutdown-timeout",
        dest="shutdown_timeout_seconds",
        type=float,
        default=DEFAULT_SHUTDOWN_SECONDS,
        metavar="SECONDS",
        help="how long SIGTERM lets running requests finish (default: %(default)g)",
    )
    group.add_argument(
        "--stall-seconds",
        type=float,
        default=DEFAULT_STALL_SECONDS,
        metavar="SECONDS",
        help="without progress for so long while there is work, /ready is 503 (default: %(default)g)",
    )
    group.add_argument(
        "--stall-exit-seconds",
        type=float,
        default=DEFAULT_STALL_EXIT_SECONDS,
        metavar="SECONDS",
        help="and for so long, every client is told and the process ends with 1 (default: %(default)g)",
    )


def config_of(options: argparse.Namespace, usage: Usage = Usage.SERVER) -> EngineConfig:
    """Raises ConfigError."""
    known = {field.name for field in fields(EngineConfig)}
    given = {name: value for name, value in vars(options).items() if name in known}
    if given.get("model") is None:
        raise ConfigError("a MODEL is needed: a path, or a repository of the Hub")
    if given.get("max_num_batched_tokens") is TokenBudget.AUTO:
        given |= {"max_num_batched_tokens": None, "token_budget": TokenBudget.AUTO}
    for name in ("served_model_names", "api_keys"):
        if given.get(name):
            given[name] = tuple(given[name])
    given["served_model_names"] = given.get("served_model_names") or (name_of(given["model"]),)
    return EngineConfig(**{**from_environment(), **given, "usage": usage})


def warnings_of(options: argparse.Namespace) -> list[str]:
    """One line for each flag that has no effect here."""
    why = flags_without_effect()
    return [
        f"{flag} has no effect: {why.get(flag) or why[f'--{flag[5:]}']}"
        for flag in dict.fromkeys(getattr(options, "without_effect", None) or ())
    ]


# --- keywords ----------------------------------------------------------------------------------------------------


class _Keywords(Parser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def from_keywords(model: str, keywords: Mapping[str, Any]) -> tuple[EngineConfig, list[str]]:
    """Of an offline engine, and what is to be warned of. A keyword is the flag's name with underscores; True and False
    switch, None is as if not given. Raises ConfigError."""
    parser = _Keywords(prog="LLM", add_help=False)
    add_model(parser)
    known = set(parser.flags())
    words = [f"--model={model}"]
    for keyword, value in keywords.items():
        flag = f"--{keyword.replace('_', '-')}"
        if value is None:
            continue
        if isinstance(value, bool):
            if value or f"--no-{flag[2:]}" in known:
                words.append(flag if value else f"--no-{flag[2:]}")
            elif flag not in known:
                parser.refuse_unknown([flag])
        elif isinstance(value, Mapping):
            words.append(f"{flag}={json.dumps(value)}")
        elif isinstance(value, list | tuple):
            words += [flag, *(str(each) for each in value)]
        else:
            words.append(f"{flag}={value}")
    options, unknown = parser.parse_known_args(words)
    parser.refuse_unknown(unknown)
    return config_of(options, Usage.OFFLINE), warnings_of(options)
