"""Requests and refusals of the OpenAI API, worded as vLLM 0.32 words them.

Owns what a request may say and which of it this engine can do. Fields it has never heard of are accepted; fields that
would change the output and are not implemented are refused by name. Knows no engine, no tokenizer and no HTTP server.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from poolwright_engine.sequence import SamplingParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_PROMPTS = 256  # of one completions request

_ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A refusal with its HTTP status; `body` is what the client reads."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        type: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type or _ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.status}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_seconds is None else {"retry-after": str(self.retry_after_seconds)}


def bad_parameter(message: str, parameter: str, value: object = None) -> ApiError:
    """400, with vLLM's trailing "(parameter=…, value=…)"."""
    shown = "" if value is None else f", value={value}"
    return ApiError(400, f"{message} (parameter={parameter}{shown})", parameter)


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What completions and chat share."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise bad_parameter("Stream options can only be defined when `stream=True`.", "stream_options")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Raises ApiError."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if any(not stop for stop in stops):
            raise bad_parameter("stop cannot contain an empty string.", "stop")
        if len(stops) > MAX_STOP_STRINGS:
            raise bad_parameter(f"stop can hold at most {MAX_STOP_STRINGS} strings, got {len(stops)}.", "stop")
        return tuple(stops)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_prompt(self) -> "CompletionRequest":
        if not self.prompt or any(part in ("", []) for part in self.prompt):
            raise bad_parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per choice. Raises ApiError for more than MAX_PROMPTS."""
        prompt: Any = self.prompt
        prompts: list[str | list[int]] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        if len(prompts) > MAX_PROMPTS:
            raise bad_parameter(f"prompt can hold at most {MAX_PROMPTS} prompts, got {len(prompts)}.", "prompt")
        return prompts


class Message(BaseModel):
    """One turn. `content` is text or a list of text parts; what else a part may be is refused by name."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """Raises ApiError."""
        fields = {key: value for key, value in (self.model_extra or {}).items() if value not in (None, [])}
        for name in ("tool_calls", "function_call", "audio"):
            if name in fields:
                raise bad_parameter(f"`{name}` in messages is not supported by this engine.", "messages")
        if self.content is None and self.role != "assistant":
            raise bad_parameter(f"A message of role {self.role} needs content.", "messages")
        return {**fields, "role": self.role, "content": self._text()}

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        texts = []
        for part in self.content:
            kind, text = part.get("type", "text"), part.get("text")
            if kind not in ("text", "input_text"):
                raise bad_parameter(f"Content of type `{kind}` is not supported; this model reads text.", "messages")
            if not isinstance(text, str):
                raise bad_parameter("A content part of type `text` needs a string `text`.", "messages")
            texts.append(text)
        return "\n".join(texts)


class ChatCompletionRequest(GenerationRequest):
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_messages(self) -> "ChatCompletionRequest":
        if not self.messages:
            raise bad_parameter("messages must hold at least one message.", "messages")
        if self.top_logprobs and not self.logprobs:
            raise bad_parameter("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        return self


class TokenizeRequest(BaseModel):
    """Of `prompt`, or of `messages` as chat would see them."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # None: as the endpoint of that kind does
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise bad_parameter("Expected either prompt or messages.", "prompt")
        return self


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


# What this engine does not do, and the values that ask for nothing. Anything else is refused by name.
_NOT_IMPLEMENTED: Mapping[str, Sequence[Any]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None, []),
    "return_tokens_as_token_ids": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "truncate_prompt_tokens": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    "structural_tag": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "continue_final_message": (None, False),
    "kv_transfer_params": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "priority": (None, 0),
}


def check_supported(request: GenerationRequest) -> None:
    """Raises ApiError that names the first field this engine cannot honour."""
    for name, value in (request.model_extra or {}).items():
        if name in _NOT_IMPLEMENTED and not any(_same(value, harmless) for harmless in _NOT_IMPLEMENTED[name]):
            raise bad_parameter(f"`{name}` is not supported by this engine.", name)
    if isinstance(request, ChatCompletionRequest) and (request.model_extra or {}).get("echo"):
        raise bad_parameter("`echo` is not supported by this engine in chat completions.", "echo")


def _same(value: object, harmless: object) -> bool:
    """0 and 0.0 are the same, True and 1 are not."""
    return isinstance(value, bool) == isinstance(harmless, bool) and value == harmless


def sampling_params(request: CompletionRequest | ChatCompletionRequest, vocab_size: int) -> SamplingParams:
    """All but the length: `max_tokens` is what was asked for, or 0 where the request leaves it to the model's length.

    A seed is drawn where the request has none. Raises ApiError.
    """
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    top_k = 0 if request.top_k in (None, -1) else request.top_k
    if temperature < 0:
        raise bad_parameter(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if not 0 < top_p <= 1:
        raise bad_parameter(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if top_k is None or top_k < 0:
        raise bad_parameter(f"top_k must be 0 (disable), or at least 1, got {top_k}.", "top_k", top_k)
    for token_id in request.stop_token_ids or ():
        if not 0 <= token_id < vocab_size:
            raise bad_parameter(
                f"stop_token_ids must be in [0, {vocab_size}), got {token_id}.", "stop_token_ids", token_id
            )
    return SamplingParams(
        max_tokens=_max_tokens(request),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
        logprobs=_logprobs(request),
    )


def _max_tokens(request: CompletionRequest | ChatCompletionRequest) -> int:
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is not None and asked < 1:
        raise bad_parameter(f"{name} must be at least 1, got {asked}.", name, asked)
    return asked or 0


def _logprobs(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        if not request.logprobs:
            return None
        name, asked = "top_logprobs", request.top_logprobs or 0
    elif request.logprobs is None:
        return None
    else:
        name, asked = "logprobs", request.logprobs
        if request.echo:
            raise bad_parameter("`logprobs` with `echo` is not supported by this engine.", "logprobs", asked)
    if asked < 0:
        raise bad_parameter(f"{name} must be non-negative, got {asked}.", name, asked)
    if asked > MAX_LOGPROBS:
        raise bad_parameter(
            f"Requested sample logprobs of {asked}, which is greater than max allowed: {MAX_LOGPROBS}", name, asked
        )
    return asked


def fit_max_tokens(prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """The output length of one prompt (`max_tokens` 0: as long as the model allows). Raises ApiError."""
    if max_tokens > max_model_len:
        raise bad_parameter(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
            max_tokens,
        )
    room = max_model_len - (max_tokens or 1)
    if prompt_tokens > room:
        raise bad_parameter(
            f"You passed {prompt_tokens} input tokens and requested {max_tokens} output tokens. However, the model's "
            f"context length is only {max_model_len} tokens, resulting in a maximum input length of {room} tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    return max_tokens or max_model_len - prompt_tokens


def finite(logprob: float) -> float:
    """JSON has no infinity; vLLM writes -9999."""
    return max(logprob, -9999.0) if not math.isnan(logprob) else -9999.0


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Of a body that is no valid request at all: worded as vLLM's, without echoing what may be megabytes."""
    lines = [
        {**error, "loc": ".".join(str(part) for part in error["loc"]), "input": _brief(error.get("input"))}
        for error in errors[:5]
    ]
    for line in lines:
        line.pop("url", None)
        if "ctx" in line:
            line["ctx"] = {key: str(value) for key, value in line["ctx"].items()}
    count = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}"
    message = "\n".join([f"{count}:", *(f"  {line}" for line in lines)])
    return ApiError(400, message, lines[0]["loc"], type="Bad Request")


def _brief(value: object) -> object:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= 100 else f"{text[:100]}…"
