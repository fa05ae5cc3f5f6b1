"""Bodies and stream chunks of completions and chat, field for field as vLLM 0.32 writes them.

Owns their shape. Plain dicts, since one is made for every token. Knows neither the engine nor HTTP.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from poolwright_engine.generation import Piece
from poolwright_engine.openai_api import finite
from poolwright_engine.sequence import TokenLogprobs
from poolwright_engine.tokenizer import Tokenizer

VERSION = version("poolwright")
FINGERPRINT = f"poolwright-{VERSION}"

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats."""

    id: str
    created: int  # Unix seconds
    model: str

    def of(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage_chunk(self, kind: str, prompt_tokens: int, completion_tokens: int) -> Json:
        """The last one, after every finish reason."""
        body = {**self.of(kind), "choices": [], "usage": usage(prompt_tokens, completion_tokens)}
        return {**body, "system_fingerprint": FINGERPRINT}


# --- completions -------------------------------------------------------------------------------------------------

COMPLETION = "text_completion"


def completion_chunk(
    head: Head,
    index: int,
    piece: Piece,
    logprobs: Json | None,
    prompt_ids: Sequence[int] | None,
    token_ids: Sequence[int] | None,
) -> Json:
    choice = {
        "index": index,
        "text": piece.text,
        "logprobs": logprobs,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "prompt_token_ids": prompt_ids,
        "token_ids": token_ids,
    }
    return {**head.of(COMPLETION), "choices": [choice]}


def completion_choice(
    index: int, text: str, last: Piece, logprobs: Json | None, prompt_ids: Sequence[int] | None, ids: list[int] | None
) -> Json:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt_ids,
    }


def completion_body(head: Head, choices: list[Json], prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        **head.of(COMPLETION),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": _full_usage(prompt_tokens, completion_tokens),
    }


class CompletionLogprobs:
    """The legacy arrays. `text_offset` counts the tokens' own texts, from `offset` (an echoed prompt's length) on."""

    def __init__(self, tokenizer: Tokenizer, offset: int) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def of(self, entries: Iterable[TokenLogprobs]) -> Json:
        offsets: list[int] = []
        chosen: list[float] = []
        tokens: list[str] = []
        tops: list[dict[str, float]] = []
        for entry in entries:
            text = self._tokenizer.token_text(entry.token_id)
            offsets.append(self._offset)
            self._offset += len(text)
            chosen.append(finite(entry.logprob))
            tokens.append(text)
            top: dict[str, float] = {}
            for token_id, logprob in _alternatives(entry):  # ids that share a text: the first one stands
                top.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
            tops.append(top)
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": tops}


# --- chat --------------------------------------------------------------------------------------------------------

CHAT_CHUNK = "chat.completion.chunk"
_CHAT = "chat.completion"


def role_chunk(head: Head, prompt_ids: Sequence[int] | None) -> Json:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return {**head.of(CHAT_CHUNK), "choices": [choice], "prompt_token_ids": prompt_ids}


def chat_chunk(head: Head, piece: Piece, logprobs: Json | None, token_ids: Sequence[int] | None) -> Json:
    choice: Json = {
        "index": 0,
        "delta": {"content": piece.text},
        "logprobs": logprobs,
        "finish_reason": piece.finish_reason,
    }
    if piece.finish_reason is not None:
        choice["stop_reason"] = piece.stop_reason
    choice["token_ids"] = token_ids
    return {**head.of(CHAT_CHUNK), "choices": [choice]}


def chat_body(
    head: Head,
    text: str,
    last: Piece,
    logprobs: Json | None,
    prompt_ids: Sequence[int] | None,
    token_ids: list[int] | None,
    prompt_tokens: int,
    completion_tokens: int,
) -> Json:
    message = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "token_ids": token_ids,
    }
    return {
        **head.of(_CHAT),
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": _full_usage(prompt_tokens, completion_tokens),
        "prompt_logprobs": None,
        "prompt_token_ids": prompt_ids,
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], top: int) -> Json:
    """`top` alternatives of each token, the sampled one first among them, as vLLM counts them."""
    return {
        "content": [
            {
                **_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_token(tokenizer, i, p) for i, p in _alternatives(entry)[:top]],
            }
            for entry in entries
        ]
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> Json:
    text = tokenizer.token_text(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def _alternatives(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The sampled token, then the most likely others."""
    return [(entry.token_id, entry.logprob), *(pair for pair in entry.top if pair[0] != entry.token_id)]


def _full_usage(prompt_tokens: int, completion_tokens: int) -> Json:
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {**usage(prompt_tokens, completion_tokens), **details}
