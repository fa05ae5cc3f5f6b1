"""The events of a stream put together into the body of an answer that does not stream, as the engine itself writes it.

What streams and bodies say alike passes through under its own key, so a newer engine may say more; what only a body
says is null, and added here.
"""

import json
from typing import Any

_COMPLETION_CHOICE = ("token_ids", "prompt_logprobs", "prompt_token_ids")
_CHAT_CHOICE = ("stop_reason", "token_ids")
_CHAT_MESSAGE = ("refusal", "annotations", "audio", "function_call")
_CHAT_TOP = ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids")
_COMPLETION_TOP = ("service_tier", "system_fingerprint")
_USAGE = ("prompt_tokens_details", "completion_tokens_details")
_TEXTS = ("text", "content", "refusal", "reasoning", "arguments")  # strings that grow


class Assembly:
    """Add every event, then take the body. `must_call`: the client left the model no choice but to call a tool."""

    def __init__(self, must_call: bool = False) -> None:
        self._must_call = must_call
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, Any] | None = None

    def add(self, fields: dict[str, Any]) -> None:
        """One event, with choices or with the usage only."""
        for key, value in fields.items():
            if key not in ("choices", "usage") and (value is not None or key not in self._top):
                self._top[key] = value
        self._usage = fields.get("usage") or self._usage
        for choice in fields.get("choices") or ():
            merged = self._choices.setdefault(choice.get("index", 0), {})
            for key, value in choice.items():
                _merge(merged, "message" if key == "delta" else key, value)

    def body(self) -> bytes:
        chat = self._top.get("object") == "chat.completion.chunk"
        top = _filled(self._top, _CHAT_TOP if chat else _COMPLETION_TOP)
        choices = [
            _filled(self._choices[index], _CHAT_CHOICE if chat else _COMPLETION_CHOICE)
            for index in sorted(self._choices)
        ]
        if chat:
            top["object"] = "chat.completion"
            for choice in choices:
                message = choice["message"] = _filled(choice.get("message") or {}, _CHAT_MESSAGE)
                if message.get("tool_calls") and not self._must_call:
                    message["content"] = message.get("content") or None  # a stream says "" with the role
        answer = {**top, "choices": choices, "usage": _filled(self._usage or {}, _USAGE)}
        return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


def _filled(fields: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return fields | {key: None for key in keys if key not in fields}


def _merge(into: dict[str, Any], key: str, value: Any) -> None:
    """Text grows, lists grow, objects merge; of anything else the last that is not null stays."""
    old = into.get(key)
    if value is None:
        into.setdefault(key, None)
    elif isinstance(value, dict):
        merged = into[key] = old if isinstance(old, dict) else {}
        for name, part in value.items():
            _merge(merged, name, part)
    elif key == "tool_calls" and isinstance(value, list):
        _merge_calls(into.setdefault(key, []), value)
    elif isinstance(value, list):
        into[key] = (old or []) + value
    elif isinstance(value, str) and key in _TEXTS:
        into[key] = (old or "") + value
    else:
        into[key] = value


def _merge_calls(calls: list[dict[str, Any]], parts: list[Any]) -> None:
    """Parts say by their index which call they belong to; a body has the calls in their order instead."""
    for part in parts:
        index = part.get("index", len(calls)) if isinstance(part, dict) else -1
        if not isinstance(index, int) or not 0 <= index <= len(calls):
            continue
        if index == len(calls):
            calls.append({})
        for key, value in part.items():
            if key != "index":
                _merge(calls[index], key, value)
