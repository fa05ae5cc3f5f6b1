"""A client's request body, read once: what the engine is sent, and what the client is owed in return.

Owns only the fields that the router changes or needs; every other field is the engine's to judge and passes through,
and so does what of those few cannot be read: the engine refuses it in its own words.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from poolwright.router.errors import RequestError
from poolwright.router.prefixes import NOTHING, Prefix, prefix_of

BYTES_PER_TOKEN = 4  # of prompts whose ids are not known yet
_SEED_BITS = 53  # exact in every JSON reader


@dataclass(frozen=True, slots=True)
class Inference:
    """`body` asks the engine for a stream with usage in every event, whatever the client asked for; where `whole` is
    true, for an answer that no stream carries."""

    body: bytes
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_tokens: int  # estimated
    choices: int  # answers to come, at least 1
    most_tokens: int | None = None  # of one answer, as far as the client says
    whole: bool = False
    must_call: bool = False  # a tool: what it says beside its calls is then "" rather than null
    prefix: Prefix = NOTHING


class _StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Fields(BaseModel):
    """Read as engines read them: "yes" is a boolean and "2" an integer."""

    model_config = ConfigDict(allow_inf_nan=False)

    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None

    @property
    def streamable(self) -> bool:
        """Nothing is asked for that only a whole answer has: log probabilities of the prompt, which an echo brings
        too, and the best of several."""
        choices = 1 if self.n is None else self.n
        return self.prompt_logprobs is None and not self.echo and self.best_of in (None, choices)


def parse(raw: bytes) -> Inference:
    """Raises RequestError, always a 400."""
    fields = _object(raw)
    prompt_tokens = _prompt_tokens(fields)
    try:
        read = _Fields.model_validate(fields)
    except ValidationError:
        return Inference(raw, False, False, False, prompt_tokens, 1, whole=True)
    stream, options = bool(read.stream), read.stream_options
    if read.seed is None and (read.temperature is None or read.temperature > 0):
        fields["seed"] = secrets.randbits(_SEED_BITS)
    whole = not stream and (options is not None or not read.streamable)
    if not whole:
        fields["stream"] = True
        given = fields.get("stream_options") or {}
        fields["stream_options"] = {**given, "include_usage": True, "continuous_usage_stats": True}
    include_usage = bool(options and options.include_usage)
    return Inference(
        body=json.dumps(fields, separators=(",", ":")).encode(),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        prompt_tokens=prompt_tokens,
        choices=_prompts(fields) * max(1, read.n or 1),
        most_tokens=read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens,
        whole=whole,
        must_call=fields.get("tool_choice") not in (None, "none", "auto"),
        prefix=prefix_of(fields),
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"body.{error.pos}"
        raise RequestError(
            400, f"JSON decode error at {where}: {error.msg}", kind="Bad Request", param=where
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, an integer of thousands of digits, NaN, too deep
        raise RequestError(400, f"JSON decode error: {error}", kind="Bad Request", param="body") from error
    if not isinstance(fields, dict):
        raise RequestError(
            400, f"Expected a JSON object, got {type(fields).__name__}", kind="Bad Request", param="body"
        )
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _prompts(fields: dict[str, Any]) -> int:
    prompt = fields.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _prompt_tokens(fields: dict[str, Any]) -> int:
    """Ids count as they are, text by its bytes; a field of a wrong type counts nothing, and the engine refuses it."""
    tokens, text_bytes = 0, 0
    messages = fields.get("messages")
    parts: list[Any] = list(messages) if isinstance(messages, list) else [fields.get("prompt")]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            text_bytes += len(part.encode(errors="surrogatepass"))
        elif isinstance(part, list):
            if part and all(type(item) is int for item in part):
                tokens += len(part)
            else:
                parts.extend(part)
        elif isinstance(part, dict):  # a message, or a part of one
            parts.append(part.get("content", part.get("text")))
    return tokens + -(-text_bytes // BYTES_PER_TOKEN)
