"""A client's request body, read once: what the engine is sent, and what the client is owed in return.

Owns only the fields that the router changes or needs; every other field is the engine's to judge and passes through.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any, NoReturn

from poolwright.router.errors import RequestError

BYTES_PER_TOKEN = 4  # of prompts whose ids are not known yet
_SEED_BITS = 53  # exact in every JSON reader


@dataclass(frozen=True, slots=True)
class Inference:
    """`body` asks the engine for a stream with usage in every event, whatever the client asked for."""

    body: bytes
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_tokens: int  # estimated
    choices: int  # answers to come, at least 1


def parse(raw: bytes) -> Inference:
    """Raises RequestError, always a 400."""
    fields = _object(raw)
    stream = _flag(fields, "stream", "stream")
    options = fields.get("stream_options")
    if options is not None and not stream:
        raise _bad("Stream options can only be defined when `stream=True`.", "stream_options")
    if options is not None and not isinstance(options, dict):
        raise _bad("stream_options must be an object.", "stream_options")
    options = options or {}
    include_usage = _flag(options, "include_usage", "stream_options.include_usage")
    continuous_usage = _flag(options, "continuous_usage_stats", "stream_options.continuous_usage_stats")
    prompt_tokens = _prompt_tokens(fields)
    choices = _choices(fields)
    fields["stream"] = True
    fields["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
    temperature = fields.get("temperature")
    if fields.get("seed") is None and (temperature is None or (_is_number(temperature) and temperature > 0)):
        fields["seed"] = secrets.randbits(_SEED_BITS)
    return Inference(
        body=json.dumps(fields, separators=(",", ":")).encode(),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        prompt_tokens=prompt_tokens,
        choices=choices,
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


def _flag(fields: dict[str, Any], key: str, name: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise _bad(f"{name} must be a boolean.", name)
    return bool(value)


def _bad(message: str, param: str) -> RequestError:
    return RequestError(400, f"{message} (parameter={param})", kind="BadRequestError", param=param)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _choices(fields: dict[str, Any]) -> int:
    prompt, n = fields.get("prompt"), fields.get("n")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * (n if isinstance(n, int) and n > 1 else 1)


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
