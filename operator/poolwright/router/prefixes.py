"""What the beginning of a prompt is known by, and which machines this router has sent such a beginning to.

Prompts are cut into pieces, and a key covers a piece and all before it, as the keys of engines' blocks do. Ids are
known by their ids; text by its bytes, since a router has no tokenizer, and so by fewer tokens than a cache may hold.
What a router believes of a cache is a preference among machines: where it is wrong, a prompt is computed. By what
engines say they found, it learns what its belief is worth; where they keep no cache, nothing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from poolwright.core.affinity import PrefixIndex
from poolwright.core.machine import Machine
from poolwright_protocol.block_hash import KEY_BYTES, block_keys, root_key

PIECE_TOKENS = 64
PIECE_BYTES = 256  # about as much text
_MOST_PIECES = 512  # of one prompt
_MEMORY = 64  # answers that the mean is over, about
_FIRST_WEIGHT = 4  # of the belief before any answer
_MACHINE_PIECES = 4096  # 262,144 tokens of cache
# What stands before the first message, or takes a part in how the prompt is written.
_BEFORE = (
    "cache_salt",
    "add_special_tokens",
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
)


@dataclass(frozen=True, slots=True)
class Prefix:
    """`share`: of the whole prompt, one piece."""

    keys: tuple[bytes, ...] = ()
    share: float = 0.0


NOTHING = Prefix()


def prefix_of(fields: Mapping[str, Any]) -> Prefix:
    """Of a request's body. Nothing where there are several prompts, no whole piece, or what no engine would take."""
    if fields.get("truncate_prompt_tokens") is not None:  # its beginning is cut off
        return NOTHING
    prompt, messages = fields.get("prompt"), fields.get("messages")
    root = root_key(**{name: json.dumps(fields[name]) for name in _BEFORE if fields.get(name) is not None})
    if isinstance(messages, list):
        return _of_text(root + b"chat", "".join(map(_written, messages)))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _of_text(root, prompt)
    return _of_ids(root, prompt) if isinstance(prompt, list) else NOTHING


class Prefixes:
    """Of one router, for the machines of its pool. Bounded for each of them."""

    def __init__(self) -> None:
        self._index = PrefixIndex(_MACHINE_PIECES)
        self._machines: Sequence[Machine] = ()
        self._worth = 1.0  # of what is believed, what is found
        self._answers = _FIRST_WEIGHT

    def follow(self, machines: Sequence[Machine]) -> None:
        """These are the machines now; one that started again has an empty cache."""
        if machines is not self._machines:
            restarts = {machine.uid: machine.restarts for machine in self._machines}
            self._index.keep(m.uid for m in machines if restarts.get(m.uid, m.restarts) == m.restarts)
            self._machines = machines

    def held(self, prefix: Prefix) -> dict[str, float]:
        """By machine, the share of this prompt that was sent there before."""
        if not prefix.keys:
            return {}
        return {uid: prefix.share * pieces for uid, pieces in self._index.blocks(prefix.keys).items()}

    def cached_tokens(self, held: Mapping[str, float], prompt_tokens: int) -> dict[str, int]:
        """By machine, how many tokens of a prompt its cache is taken to hold; never all, since an engine computes the
        last."""
        cached = {uid: min(int(prompt_tokens * share * self._worth), prompt_tokens - 1) for uid, share in held.items()}
        return {uid: tokens for uid, tokens in cached.items() if tokens > 0}

    def found(self, held: float, cached_tokens: int | None, prompt_tokens: int | None) -> None:
        """What the engine says of a prompt that it computed itself, of which it was believed to hold this share."""
        if held > 0 and cached_tokens is not None and prompt_tokens:
            self._answers += 1
            right = min(1.0, cached_tokens / prompt_tokens / held)
            self._worth += (right - self._worth) / min(self._answers, _MEMORY)

    def record(self, prefix: Prefix, machines: Iterable[Machine]) -> None:
        """They will have computed this prompt, or been given its KV."""
        if prefix.keys:
            for machine in machines:
                self._index.record(machine.uid, prefix.keys)


def _of_ids(root: bytes, prompt: Sequence[Any]) -> Prefix:
    ids = prompt[: _MOST_PIECES * PIECE_TOKENS]
    if not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        return NOTHING
    keys = tuple(block_keys(root, ids, PIECE_TOKENS))
    return Prefix(keys, PIECE_TOKENS / len(prompt)) if keys else NOTHING


def _of_text(root: bytes, text: str) -> Prefix:
    raw = text.encode(errors="surrogatepass")
    keys: list[bytes] = []
    key = root
    for start in range(0, min(len(raw), _MOST_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        key = blake2b(key + raw[start : start + PIECE_BYTES], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return Prefix(tuple(keys), PIECE_BYTES / len(raw)) if keys else NOTHING


def _written(message: Any) -> str:
    """Its role first, as templates have it, whatever the order in which a client names its fields."""
    role = message.get("role") if isinstance(message, dict) else None
    return json.dumps([role, message], separators=(",", ":"), ensure_ascii=False, sort_keys=True)
