"""Guided output: which tokens keep a text within a JSON schema, an expression, a list of choices or a grammar.

Owns the compiled grammars, made by llguidance over the model's tokenizer. Knows no requests, no logits and no sampling.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from numpy.typing import NDArray

from poolwright_engine.scheduling.sequence import Guide, GuideKind
from poolwright_engine.text.tokenizer import Tokenizer

MAX_GUIDE_CHARS = 262_144
_MAX_ERROR_CHARS = 400
_FORMATS = {GuideKind.JSON_SCHEMA: "json_schema", GuideKind.REGEX: "regex", GuideKind.GRAMMAR: "grammar"}


class GuideError(Exception):
    """One line for the client whose guide it is."""


class GuideState:
    """Where one text is within its guide. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> "GuideState":
        return GuideState(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> NDArray[np.bool_]:
        """(vocab_size,): which tokens may come next; once the text is complete and nothing can follow, only those that
        end it. Raises GuideError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise self._error()
        # The model's vocabulary may be padded beyond the tokenizer's: zeros are filled in.
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def advance(self, token_ids: Sequence[int]) -> None:
        """They were sampled; after the end of the text anything may have been. Raises GuideError."""
        for token_id in token_ids:
            if self._matcher.is_stopped() and not self._matcher.is_error():
                return
            if not self._matcher.consume_token(token_id):
                raise self._error()

    def _error(self) -> GuideError:
        return GuideError(f"the output left its guide: {_one_line(self._matcher.get_error())}")


class _Vocabulary:
    """The tokenizer as llguidance asks for one: made from bytes, it costs a fraction of what the library needs to read
    a tokenizer.json."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.bytes_within_text(token_id) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if tokenizer.is_special(token_id)]
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """How text that a guide leaves no choice about is to be spelled. A tokenizer may put a space before it, as at
        the start of a text; then by the longest tokens that fit."""
        ids = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        if b"".join(self.tokens[token_id] for token_id in ids) == text:
            return ids
        return self._longest(text)

    def _longest(self, text: bytes) -> list[int]:
        found, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._most_bytes), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[text[start:end]])
            start = end
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: token_id for token_id, token in reversed(list(enumerate(self.tokens)))}

    @cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self.tokens))


class Guides:
    """Guides of one model. Thread-safe.

    Making it takes a second for a large vocabulary, in which no other thread runs: before serving. A new grammar may
    take as long, but lets others run: `check` compiles it, in a thread, and what it compiled is kept for `start`.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, kept: int = 128) -> None:
        """`vocab_size`: the model's. `kept`: most compiled guides remembered."""
        self._vocab_size = vocab_size
        self._kept = kept
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        if tokenizer.eos_ids:
            wrapper = TokenizerWrapper(_Vocabulary(tokenizer))
            self._tokenizer = LLTokenizer(wrapper, eos_token=sorted(tokenizer.eos_ids))

    def check(self, guide: Guide) -> str | None:
        """Why this guide cannot be followed, in one line for its client; None: it can."""
        try:
            self._matcher(guide)
        except GuideError as error:
            return str(error)
        return None

    def start(self, guide: Guide, output_ids: Sequence[int] = ()) -> GuideState:
        """The state after these tokens. Raises GuideError."""
        state = GuideState(self._matcher(guide).deep_copy(), self._vocab_size)
        state.advance(output_ids)
        return state

    def _matcher(self, guide: Guide) -> LLMatcher:
        if self._tokenizer is None:
            raise GuideError("guided output needs a model whose tokenizer names an end-of-text token")
        with self._lock:
            known = self._compiled.get(guide)
            if known is not None:
                self._compiled.move_to_end(guide)
                return known
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, _grammar(guide), log_level=0, limits=limits)
        # The first mask is made here, for all copies; it also says whether there is any text to follow.
        possible = matcher.is_error() or any(matcher.compute_bitmask())
        if matcher.is_error():
            raise GuideError(_one_line(matcher.get_error()))
        if not possible:
            raise GuideError("the guide allows no text")
        with self._lock:
            self._compiled[guide] = matcher
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        return matcher


def _grammar(guide: Guide) -> str:
    """As llguidance takes it. Raises GuideError."""
    if len(guide.text) > MAX_GUIDE_CHARS:
        raise GuideError(f"the guide has {len(guide.text)} characters, more than the {MAX_GUIDE_CHARS} allowed")
    try:
        if guide.kind is GuideKind.CHOICE:
            return str(grammar_from("lark", _choices(guide.text)))
        if guide.kind is GuideKind.JSON_OBJECT:
            return str(grammar_from("json_schema", '{"type": "object"}'))
        if guide.kind is GuideKind.JSON_SCHEMA:
            json.loads(guide.text)  # the library pastes the text into JSON of its own
        return str(grammar_from(_FORMATS[guide.kind], guide.text))
    except json.JSONDecodeError as error:
        raise GuideError(f"the guide is not JSON: {_one_line(str(error))}") from error
    except (ValueError, RecursionError) as error:
        raise GuideError(_one_line(str(error))) from error


def _choices(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise GuideError("a choice needs a list of one or more strings")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "…"
