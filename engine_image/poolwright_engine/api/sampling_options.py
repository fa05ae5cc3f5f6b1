"""From a request to `SamplingParams`: ranges and ids checked and refused as vLLM 0.32 does.

Owns the defaults, the meaning of each option and which seed a choice has. Knows no text and no HTTP.
"""

import json
import math
import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from poolwright_engine.api.api_error import bad_parameter, bad_request, brief
from poolwright_engine.api.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    NamedTool,
    Tool,
)
from poolwright_engine.scheduling.sequence import Guide, GuideKind, SamplingParams

N = TypeVar("N", int, float)

MAX_LOGPROBS = 20
MAX_SCHEMA_DEPTH = 64
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM writes this


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say. `max_tokens`: of chat, None: to the context's end; completions have their
    own. `most_tokens`: no answer of the server is longer; None: any."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    most_tokens: int | None = None

    def __str__(self) -> str:
        """What is not neutral, as facts of a line of the log."""
        facts = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return " ".join(f"{name}={value}" for name, value, neutral in facts if value != neutral)

    def within(self, max_model_len: int) -> "SamplingDefaults":
        """Lengths that no request of this model would be refused for."""
        longest, most = (None if n is None else min(n, max_model_len) for n in (self.max_tokens, self.most_tokens))
        return replace(self, max_tokens=longest, most_tokens=most)


NEUTRAL = SamplingDefaults()
_seeds: random.Random = secrets.SystemRandom()


def draw_seeds_from(seed: int | None) -> None:
    """Of requests that bring none, in this process: the same requests in the same order then get the same answers.
    None: from the system, no two alike."""
    global _seeds
    _seeds = secrets.SystemRandom() if seed is None else random.Random(seed)


def sampling_params(
    request: CompletionRequest | ChatCompletionRequest, vocab_size: int, defaults: SamplingDefaults = NEUTRAL
) -> SamplingParams:
    """All but the length and the seed: `max_tokens` is what was asked for, or 0 where the request leaves it to the
    model's length; `of_choice` gives each choice its seed. Raises ApiError."""
    temperature = _said(request.temperature, defaults.temperature)
    top_p = _said(request.top_p, defaults.top_p)
    top_k = _said(request.top_k, defaults.top_k)
    top_k = 0 if top_k == -1 else top_k
    min_p = _said(request.min_p, defaults.min_p)
    presence = _said(request.presence_penalty, defaults.presence_penalty)
    frequency = _said(request.frequency_penalty, defaults.frequency_penalty)
    repetition = _said(request.repetition_penalty, defaults.repetition_penalty)
    if not -2 <= presence <= 2:
        raise bad_request(f"presence_penalty must be in [-2, 2], got {presence}.", "presence_penalty")
    if not -2 <= frequency <= 2:
        raise bad_request(f"frequency_penalty must be in [-2, 2], got {frequency}.", "frequency_penalty")
    if repetition <= 0:
        raise bad_request(f"repetition_penalty must be greater than zero, got {repetition}.", "repetition_penalty")
    if temperature < 0:
        raise bad_parameter(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if temperature > 2:
        raise bad_parameter(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if not 0 < top_p <= 1:
        raise bad_parameter(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if top_k < 0:
        raise bad_request(f"top_k must be 0 (disable), or at least 1, got {brief(top_k)}.", "top_k")
    if not 0 <= min_p <= 1:
        raise bad_request(f"min_p must be in [0, 1], got {min_p}.", "min_p")
    if temperature == 0 and request.tries > 1:
        name = "n" if request.best_of is None else "best_of"
        raise bad_request(f"{name} must be 1 when using greedy sampling, got {request.tries}.", name)
    max_tokens = _max_tokens(request, defaults)
    min_tokens = request.min_tokens or 0
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {brief(min_tokens)}.", "min_tokens")
    if max_tokens and min_tokens > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {brief(min_tokens)}."
        raise bad_request(message, "min_tokens")
    stop_token_ids = tuple(dict.fromkeys(request.stop_token_ids or ()))
    _check_vocabulary("stop_token_ids", stop_token_ids, vocab_size)
    logprobs, prompt_logprobs = _logprobs(request, vocab_size)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k >= vocab_size else top_k,
        min_p=min_p,
        stop_token_ids=stop_token_ids,
        ignore_eos=request.ignore_eos,
        min_tokens=min_tokens,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        allowed_token_ids=_allowed(request.allowed_token_ids, vocab_size),
        guide=guide_of(request),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def of_choice(params: SamplingParams, asked: GenerationRequest, order: int, max_tokens: int) -> SamplingParams:
    """Of the `order`-th choice of a prompt: with seed + order, or one drawn where the request has none."""
    if asked.seed is None or asked.seed == -1:
        seed = _seeds.getrandbits(63)
    else:
        seed = (asked.seed + order + 2**63) % 2**64 - 2**63
    best_of = asked.tries > asked.choices
    return replace(
        params,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        seed=seed,
        logprobs=0 if best_of and params.logprobs is None else params.logprobs,
    )


def finite(logprob: float) -> float:
    return _LEAST_LOGPROB if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)


def _said(value: N | None, default: N) -> N:
    return default if value is None else value


def _max_tokens(request: CompletionRequest | ChatCompletionRequest, defaults: SamplingDefaults) -> int:
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, CompletionRequest):
        if request.only_echo:
            return 1  # what is generated is not shown
        asked = request.default_max_tokens if asked is None else asked
    elif request.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is not None and asked < 1:
        raise bad_parameter(f"{name} must be at least 1, got {brief(asked)}.", name, asked)
    if asked is None and isinstance(request, ChatCompletionRequest):
        asked = defaults.max_tokens
    if defaults.most_tokens is not None:
        return min(asked or defaults.most_tokens, defaults.most_tokens)
    return asked or 0


def _logprobs(request: CompletionRequest | ChatCompletionRequest, vocab_size: int) -> tuple[int | None, int | None]:
    """Of the output and of the prompt. An echo shows the prompt's as it shows the output's."""
    if isinstance(request, ChatCompletionRequest):
        name, top = "top_logprobs", request.top_logprobs or 0
        asked = top if request.logprobs else None
        echoed: int | None = top
    else:
        name, asked = "logprobs", request.logprobs
        echoed = asked
    prompt = echoed if request.prompt_logprobs is None and request.echo else request.prompt_logprobs
    for kind, parameter, count in (("sample", name, asked), ("prompt", "prompt_logprobs", prompt)):
        wanted = vocab_size if count == -1 else count or 0
        if wanted > MAX_LOGPROBS:
            message = f"Requested {kind} logprobs of {brief(wanted)}, which is greater than max allowed: {MAX_LOGPROBS}"
            raise bad_parameter(message, parameter, wanted)
    return (vocab_size if asked == -1 else asked), (vocab_size if prompt == -1 else prompt)


def _logit_bias(asked: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    wrong = [key for key in asked if not _is_integer(key)]
    if wrong:
        message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {brief(wrong)!r}"
        raise bad_parameter(message, "logit_bias", wrong)
    biases = {int(key): min(100.0, max(-100.0, bias)) for key, bias in asked.items()}
    _check_vocabulary("logit_bias", tuple(biases), vocab_size)
    return tuple(biases.items())


def _allowed(asked: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if asked is None:
        return None
    if not asked:
        raise bad_parameter("allowed_token_ids is not None and empty!", "allowed_token_ids", asked)
    outside = [token_id for token_id in asked if not 0 <= token_id < vocab_size]
    if outside:
        raise bad_parameter("allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids", outside)
    return tuple(sorted(set(asked)))


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) <= 20


def _check_vocabulary(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    outside = [brief(token_id) for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        message = f"token_id(s) {outside[:10]} in {name} contain out-of-vocab token ids. Vocabulary size: {vocab_size}"
        raise bad_parameter(message, name, outside)


# --- guided output -----------------------------------------------------------------------------------------------


def guide_of(request: GenerationRequest) -> Guide | None:
    """What the output must match. Raises ApiError."""
    found = _asked_guides(request)
    if isinstance(request, ChatCompletionRequest) and request.must_call:
        if found:
            message = "You can only either use constraints for structured outputs or tools, not both."
            raise bad_request(message, "tool_choice")
        return Guide(GuideKind.JSON_SCHEMA, _schema_text(_schema_of_calls(request), "tools"))
    if len(found) > 1:
        names = [name for name, _ in found]
        message = f"You can only use one kind of structured outputs constraint but multiple are specified: {names}"
        raise bad_request(message, names[0])
    if not found:
        if request.structured_outputs is not None:
            message = "You must use one kind of structured outputs constraint but none are specified."
            raise bad_request(message, "structured_outputs")
        return None
    return found[0][1]


def _asked_guides(request: GenerationRequest) -> list[tuple[str, Guide]]:
    """Each with the name of the field that asks for it."""
    found: list[tuple[str, Guide]] = []

    def take(name: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None) -> None:
        if schema is not None:
            found.append((name, Guide(GuideKind.JSON_SCHEMA, _schema_text(schema, name))))
        if regex is not None:
            found.append((name, Guide(GuideKind.REGEX, regex)))
        if choice is not None:
            found.append((name, Guide(GuideKind.CHOICE, json.dumps(choice))))
        if grammar is not None:
            found.append((name, Guide(GuideKind.GRAMMAR, grammar)))

    outputs = request.structured_outputs
    if outputs is not None:
        take("structured_outputs", outputs.json_schema, outputs.regex, outputs.choice, outputs.grammar)
        if outputs.json_object:
            found.append(("structured_outputs", Guide(GuideKind.JSON_OBJECT, "")))
    take("guided_json", request.guided_json, None, None, None)
    take("guided_regex", None, request.guided_regex, None, None)
    take("guided_choice", None, None, request.guided_choice or None, None)
    take("guided_grammar", None, None, None, request.guided_grammar)
    form = request.response_format
    if form is not None and form.type == "json_object":
        found.append(("response_format", Guide(GuideKind.JSON_OBJECT, "")))
    if form is not None and form.type == "json_schema" and form.json_schema is not None:
        if form.json_schema.json_schema is None:
            message = "You must use one kind of structured outputs constraint but none are specified."
            raise bad_request(message, "response_format")
        take("response_format", form.json_schema.json_schema, None, None, None)
    return found


def _schema_of_calls(request: ChatCompletionRequest) -> dict[str, Any]:
    """Of a named tool its arguments alone; of any tool a list of {name, parameters}."""
    tools = request.tools or []
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        return next(_parameters(tool) for tool in tools if tool.function.name == name)
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = _parameters(tool)
        for name, definition in (parameters.pop("$defs", None) or {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise bad_parameter(f"Tool definition '{name}' has multiple schemas, which is not supported.", "tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if request.one_call:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _parameters(tool: Tool) -> dict[str, Any]:
    return dict(tool.function.parameters or {"type": "object", "properties": {}})


def _schema_text(schema: str | dict[str, Any], parameter: str) -> str:
    """Raises ApiError."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise bad_parameter("The JSON schema is not valid JSON.", parameter) from error
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        nodes = (node for node in level if isinstance(node, dict | list))
        level = [part for node in nodes for part in (node.values() if isinstance(node, dict) else node)]
        if not level:
            return json.dumps(value)
    message = f"The JSON schema is nested too deeply: objects and arrays may nest at most {MAX_SCHEMA_DEPTH} levels"
    raise bad_request(message, parameter)
