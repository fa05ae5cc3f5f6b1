"""Bodies and stream chunks of completions and chat, field for field as vLLM 0.32 writes them.

Owns their shape. Plain dicts, since one is made for every token. Knows neither the engine nor HTTP.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from poolwright_engine.api.generation import Piece
from poolwright_engine.api.sampling_options import finite
from poolwright_engine.scheduling.sequence import TokenLogprobs
from poolwright_engine.text.tokenizer import Tokenizer, TokenTexts

VERSION = version("poolwright")
FINGERPRINT = f"poolwright-{VERSION}"

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
EMPTY_COMMENT = b":\n\n"


def dumped(body: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which a client can write in JSON, becomes a question mark."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + dumped(body) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def full_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    """Of a whole answer. vLLM gives the details only where it is started to."""
    details = {"prompt_tokens_details": {"cached_tokens": cached_tokens}, "completion_tokens_details": None}
    return {**usage(prompt_tokens, completion_tokens), **details}


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats."""

    id: str
    created: int  # Unix seconds
    model: str

    def of(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage_chunk(self, kind: str, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
        """The last one, after every finish reason."""
        about = full_usage(prompt_tokens, completion_tokens, cached_tokens)
        shown = {key: value for key, value in about.items() if value is not None}
        return {**self.of(kind), "choices": [], "usage": shown, "system_fingerprint": FINGERPRINT}

    def body(self, kind: str, choices: list[Json], usage: Json) -> Json:
        about = {"service_tier": None, "system_fingerprint": FINGERPRINT}
        return {**self.of(kind), "choices": choices, **about, "usage": usage}


class Tokens:
    """How tokens are shown: as their text, or as `token_id:…` where the client asked for that."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._as_ids = as_ids

    def alternative(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.of(token_id)

    def next(self, token_id: int) -> str:
        """Of a token that came; alternatives to it are asked for before."""
        text = self._texts.push(token_id)
        return f"token_id:{token_id}" if self._as_ids else text

    def bytes_of(self, token_id: int) -> list[int]:
        """A client can join those of a character that is spread over tokens."""
        return list(self._tokenizer.token_bytes(token_id))


def _alternatives(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The sampled token, then the most likely others."""
    return [(entry.token_id, entry.logprob), *(pair for pair in entry.top if pair[0] != entry.token_id)]


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], entries: Sequence[TokenLogprobs] | None
) -> list[Json | None] | None:
    """By token id, of every token of the prompt; of the first there is nothing to say."""
    if entries is None:
        return None
    tokens = Tokens(tokenizer)
    tokens.next(prompt_ids[0])
    made: list[Json | None] = [None]
    for entry in entries:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        made.append(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": entry.rank if token_id == entry.token_id else ranks[token_id],
                    "decoded_token": tokens.alternative(token_id),
                }
                for token_id, logprob in _alternatives(entry)
            }
        )
        tokens.next(entry.token_id)
    return made


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
    index: int,
    text: str,
    last: Piece,
    logprobs: Json | None,
    prompt_logprobs: list[Json | None] | None,
    prompt_ids: Sequence[int] | None,
    token_ids: list[int] | None,
) -> Json:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "token_ids": token_ids,
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": prompt_ids,
    }


class CompletionLogprobs:
    """The legacy arrays of one choice, in as many parts as it comes. `text_offset` counts the tokens' own texts."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._offset = 0

    def of_prompt(self, prompt_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Json:
        """Of an echo: of the first token there is nothing to say."""
        text = self._tokens.next(prompt_ids[0])
        rest = self._of(entries, len(text))
        return {
            "text_offset": [0, *rest["text_offset"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "tokens": [text, *rest["tokens"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
        }

    def of(self, entries: Iterable[TokenLogprobs]) -> Json:
        return self._of(entries, 0)

    def _of(self, entries: Iterable[TokenLogprobs], skip: int) -> Json:
        self._offset += skip
        made: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entry in entries:
            top: dict[str, float] = {}
            for token_id, logprob in _alternatives(entry):  # ids that share a text: the first one stands
                top.setdefault(self._tokens.alternative(token_id), finite(logprob))
            text = self._tokens.next(entry.token_id)
            made["text_offset"].append(self._offset)
            made["token_logprobs"].append(finite(entry.logprob))
            made["tokens"].append(text)
            made["top_logprobs"].append(top)
            self._offset += len(text)
        return made


def joined(parts: Sequence[Json]) -> Json:
    return {key: [each for part in parts for each in part[key]] for key in parts[0]}


# --- chat --------------------------------------------------------------------------------------------------------

CHAT_CHUNK = "chat.completion.chunk"
CHAT = "chat.completion"


def role_chunk(head: Head, index: int, role: str, prompt_ids: Sequence[int] | None, prompt_text: str | None) -> Json:
    choice = {"index": index, "delta": {"role": role, "content": ""}, "logprobs": None, "finish_reason": None}
    about = {"prompt_token_ids": prompt_ids, "prompt_text": prompt_text}
    return {**head.of(CHAT_CHUNK), "choices": [choice], **about}


def said_chunk(head: Head, index: int, text: str) -> Json:
    """Text that is no token of the output."""
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return {**head.of(CHAT_CHUNK), "choices": [choice]}


def chat_chunk(
    head: Head,
    index: int,
    delta: Json,
    piece: Piece,
    finish_reason: str | None,
    logprobs: Json | None,
    token_ids: Sequence[int] | None,
) -> Json:
    choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    if finish_reason is not None:
        choice["stop_reason"] = piece.stop_reason
    choice["token_ids"] = token_ids
    return {**head.of(CHAT_CHUNK), "choices": [choice]}


def chat_choice(
    index: int,
    role: str,
    content: str | None,
    calls: list[Json],
    last: Piece,
    finish_reason: str | None,
    logprobs: Json | None,
    token_ids: list[int] | None,
) -> Json:
    message: Json = {
        "role": role,
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": last.stop_reason,
        "token_ids": token_ids,
    }


def chat_logprobs(tokens: Tokens, entries: Iterable[TokenLogprobs], top: int) -> Json:
    """`top` alternatives of each token, the sampled one first among them, as vLLM counts them."""
    content = []
    for entry in entries:
        others = [
            {"token": tokens.alternative(i), "logprob": finite(p), "bytes": tokens.bytes_of(i)}
            for i, p in _alternatives(entry)[:top]
        ]
        about = {"token": tokens.next(entry.token_id), "logprob": finite(entry.logprob)}
        content.append({**about, "bytes": tokens.bytes_of(entry.token_id), "top_logprobs": others})
    return {"content": content}
