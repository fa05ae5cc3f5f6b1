"""From what a client wrote to token ids: chat template, tokenizing, truncation, and how long a prompt may be.

Owns that long text never holds up the event loop: it is rendered and tokenized in a thread, of which few run at once,
to leave the processor to the step loop. Knows no sampling and no HTTP.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from pydantic import BaseModel

from poolwright_engine.api.api_error import bad_parameter, brief
from poolwright_engine.api.openai_api import CompletionRequest, Conversation, GenerationRequest
from poolwright_engine.text.tokenizer import ChatTemplateError, Tokenizer

T = TypeVar("T")

# Tokenized on the spot in well under a millisecond; a thread would take longer to wake.
_INLINE_CHARACTERS = 4096
# What takes time beside text, in characters that take as much: a prompt, a message or tool, any other value.
_PER_PROMPT, _PER_MESSAGE, _PER_VALUE = 64, 256, 8
_MOST_THREADS = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text`: as the client wrote it or the template made it; None of ids, and of what was truncated."""

    token_ids: tuple[int, ...]
    text: str | None


class Prompts:
    """`vocab_size` is the model's: what it can embed. `max_chars_per_token` bounds the text worth tokenizing."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int, max_chars_per_token: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_characters = max_model_len * max_chars_per_token
        self._threads = asyncio.Semaphore(_MOST_THREADS)

    async def of_completion(self, asked: CompletionRequest) -> list[Prompt]:
        """In the order of the client's list. Raises ApiError."""
        prompts = asked.prompts
        size = sum(len(prompt) + _PER_PROMPT for prompt in prompts)
        return await self.in_thread(size, lambda: [self._of_one(prompt, asked) for prompt in prompts])

    async def of_chat(self, asked: GenerationRequest, conversation: Conversation) -> Prompt:
        """Raises ApiError."""
        token_ids, text = await self._of_conversation(conversation, self._max_characters)
        return self._truncated(token_ids, text, asked)

    async def texts_of(self, prompts: Sequence[Prompt]) -> list[str]:
        size = sum(len(prompt.token_ids) + _PER_PROMPT for prompt in prompts if prompt.text is None)
        return await self.in_thread(size, lambda: [self._text_of(prompt) for prompt in prompts])

    async def decoded(self, token_ids: Sequence[int]) -> str:
        """Special tokens included."""
        return await self.in_thread(len(token_ids), lambda: self._decoded(token_ids))

    async def symbols(self, token_ids: Sequence[int]) -> list[str]:
        """As the vocabulary spells them."""
        symbol = self._tokenizer.token_symbol
        return await self.in_thread(len(token_ids), lambda: [symbol(token_id) for token_id in token_ids])

    async def tokenized(self, text: str, add_special_tokens: bool) -> list[int]:
        """Of any length that a body can hold. Raises ApiError."""
        return await self.in_thread(len(text), lambda: self._encoded(text, add_special_tokens))

    async def tokenized_chat(self, conversation: Conversation) -> list[int]:
        """The same. Raises ApiError."""
        return (await self._of_conversation(conversation, None))[0]

    async def in_thread(self, size: int, work: Callable[[], T]) -> T:
        """At once where it is small, in characters or tokens."""
        if size <= _INLINE_CHARACTERS:
            return work()
        async with self._threads:
            return await asyncio.to_thread(work)

    def check_ids(self, token_ids: Sequence[int], parameter: str) -> None:
        """Raises ApiError."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong = brief(next(i for i in token_ids if not 0 <= i < self._vocab_size))
            raise bad_parameter(f"Token id {wrong} is out of vocabulary [0, {self._vocab_size}).", parameter)

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        _check_characters(text)
        return self._tokenizer.encode(text, add_special_tokens)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _text_of(self, prompt: Prompt) -> str:
        return self._decoded(prompt.token_ids) if prompt.text is None else prompt.text

    def _of_one(self, prompt: str | list[int], asked: CompletionRequest) -> Prompt:
        if isinstance(prompt, str):
            self._check_length(prompt, self._max_characters)
            token_ids = self._encoded(prompt, asked.add_special_tokens)
            return self._truncated(token_ids, prompt, asked)
        if len(prompt) <= self._max_model_len:  # a longer one is refused for that, or cut first
            self.check_ids(prompt, "prompt")
        made = self._truncated(prompt, None, asked)
        self.check_ids(made.token_ids[: self._max_model_len], "prompt")
        return made

    async def _of_conversation(self, asked: Conversation, limit: int | None) -> tuple[list[int], str]:
        def render() -> str:
            messages = [message.for_template() for message in asked.messages]
            text = self._tokenizer.render_chat(messages, asked.add_generation_prompt, **asked.variables)
            return _open_ended(text, messages[-1]["content"]) if asked.continue_final_message else text

        try:
            text = await self.in_thread(_size_of(asked), render)
        except ChatTemplateError as error:
            raise bad_parameter(f"{error}.", "messages") from error
        if limit is not None:
            self._check_length(text, limit)
        return await self.tokenized(text, asked.add_special_tokens), text

    def _truncated(self, token_ids: list[int], text: str | None, asked: GenerationRequest) -> Prompt:
        keep = asked.truncate_prompt_tokens
        if keep is not None and keep > self._max_model_len:
            raise bad_parameter(
                f"truncate_prompt_tokens={keep} cannot be greater than max_model_len = {self._max_model_len}. "
                "Please request a smaller truncation size.",
                "truncate_prompt_tokens",
                keep,
            )
        if keep == -1:
            keep = self._max_model_len - 1  # room for one token of output
        if keep is not None and len(token_ids) > keep:
            side = asked.truncation_side or "left"
            token_ids = token_ids[:keep] if side == "right" or not keep else token_ids[-keep:]
            text = None
        return Prompt(tuple(token_ids), text)

    def _check_length(self, text: str, limit: int) -> None:
        """Refuses it without the work of tokenizing it."""
        if len(text) > limit:
            raise bad_parameter(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your prompt contains "
                f"{len(text)} characters (more than {limit} characters, which is the upper bound for "
                f"{self._max_model_len} input tokens). Please reduce the length of the input prompt.",
                "input_text",
                len(text),
            )


def _size_of(asked: Conversation) -> int:
    """Of all that the template sees; counted no further than it matters."""
    size = 0
    todo: list[Iterator[object]] = [
        iter((asked.messages, asked.tools, asked.documents, asked.chat_template_kwargs)),
    ]
    while todo and size <= _INLINE_CHARACTERS:
        value = next(todo[-1], todo)
        if value is todo:
            todo.pop()
        elif isinstance(value, str):
            size += len(value) + _PER_VALUE
        elif isinstance(value, BaseModel):
            size += _PER_MESSAGE
            todo.append(chain(vars(value).values(), (value.model_extra or {}).values()))
        else:
            size += _PER_VALUE
            if isinstance(value, Mapping):
                todo.append(chain(value, value.values()))
            elif isinstance(value, list):
                todo.append(iter(value))
    return size


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_parameter("The text holds a lone surrogate, which is no character.", "prompt") from error


def _open_ended(text: str, last: str) -> str:
    """The prompt up to the end of the last message, without what a template puts after it. Raises ChatTemplateError."""
    bare = last.strip()
    at = text.rfind(bare)
    if not bare or at < 0:
        raise ChatTemplateError("the final message cannot be continued: the template does not show its text as it is")
    spaced = last.lstrip()
    return text[: at + len(spaced if text.startswith(spaced, at) else bare)]
