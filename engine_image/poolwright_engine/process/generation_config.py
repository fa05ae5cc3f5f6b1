"""Defaults of sampling that come with a model, in its generation_config.json, or from an option in place of it.

Owns where they are found, and that a bad one is refused by name. The fields are those that vLLM 0.32 reads
(`ModelConfig.get_diff_sampling_param`), and nothing else of the file: where a text ends is the tokenizer's.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poolwright_engine.api.api_error import ApiError, brief
from poolwright_engine.api.openai_api import CompletionRequest
from poolwright_engine.api.sampling_options import NEUTRAL, SamplingDefaults, sampling_params
from poolwright_engine.process.config import (
    GENERATION_CONFIG_OF_MODEL,
    NO_GENERATION_CONFIG,
    ConfigError,
    EngineConfig,
)

FILE = "generation_config.json"
OPTION = "--override-generation-config"
_MOST_TOKENS = "max_new_tokens"
_WHOLE = ("top_k", _MOST_TOKENS)
NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    _MOST_TOKENS,
)
_ANY_VOCABULARY = 2**31
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Found:
    """`sources`: the file and the option that gave any of it."""

    defaults: SamplingDefaults = NEUTRAL
    sources: tuple[str, ...] = ()


def sampling_defaults(config: EngineConfig, model: Path | None) -> Found:
    """`model`: its folder or file; None: not known yet, and nothing is read of it. Raises ConfigError."""
    folder = _folder(config, model)
    of_file, where = ({}, "") if folder is None else (_read(folder / FILE), f"{folder / FILE}")
    of_option = config.override_generation_config
    values: dict[str, Any] = {}
    sources = []
    for name in NAMES:
        given, source = (of_option, OPTION) if name in of_option else (of_file, where)
        if given.get(name) is not None:
            values[name] = _checked(source, name, given[name])
            sources.append(source)
    longest = values.pop(_MOST_TOKENS, None)
    # A limit of the whole server where a person set it; the model's own is what chat gets without one.
    is_limit = config.generation_config not in (GENERATION_CONFIG_OF_MODEL, NO_GENERATION_CONFIG)
    is_limit = is_limit or of_option.get(_MOST_TOKENS) is not None
    defaults = SamplingDefaults(**values, max_tokens=longest, most_tokens=longest if is_limit else None)
    return Found(defaults, tuple(dict.fromkeys(sources)))


def unused(config: EngineConfig) -> Iterator[str]:
    """What the option sets and nothing here reads."""
    return (name for name in config.override_generation_config if name not in NAMES)


def _folder(config: EngineConfig, model: Path | None) -> Path | None:
    """Where there is a file to read. Raises ConfigError."""
    given = config.generation_config
    if given == NO_GENERATION_CONFIG:
        return None
    if given == GENERATION_CONFIG_OF_MODEL:
        return model if model is not None and (model / FILE).is_file() else None
    folder = Path(given).expanduser()
    if not (folder / FILE).is_file():
        raise ConfigError(f"--generation-config: {given} is neither auto, vllm nor a folder that holds {FILE}")
    return folder


def _read(file: Path) -> Mapping[str, Any]:
    """Raises ConfigError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--generation-config: {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--generation-config: {file} is not a JSON object")
    return value


def _checked(source: str, name: str, value: Any) -> float | int:
    """Raises ConfigError."""
    where = source if source.startswith("--") else f"--generation-config: {source}"
    whole = name in _WHOLE
    known = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not known or not abs(value) <= _LARGEST:  # a NaN is not, either
        raise ConfigError(f"{where}: {name} must be {'an integer' if whole else 'a number'}, not {brief(value)!r}")
    if name == _MOST_TOKENS:
        if value < 1:
            raise ConfigError(f"{where}: {name} must be at least 1, not {value}")
        return int(value)
    try:
        sampling_params(CompletionRequest(prompt="x", **{name: value}), _ANY_VOCABULARY)
    except ApiError as error:
        raise ConfigError(f"{where}: {error}") from error
    return max(0, int(value)) if whole else float(value)  # -1 is what some call "all" of top_k
