"""What a chat request becomes: its choices, and their answer as chunks or as one body, tool calls told apart from text.

Knows no HTTP; what cannot be done is an ApiError before anything starts.
"""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from poolwright_engine.api import responses
from poolwright_engine.api.answer import Answer, Served
from poolwright_engine.api.api_error import bad_parameter
from poolwright_engine.api.fan_out import Choice, Collected, Tally, best, choices_of, collected, merged
from poolwright_engine.api.generation import Piece
from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.api.openai_api import ChatCompletionRequest, NamedTool
from poolwright_engine.api.prompts import Prompt
from poolwright_engine.api.responses import Json, Tokens
from poolwright_engine.api.routed import Routed
from poolwright_engine.scheduling.sequence import FinishReason
from poolwright_engine.text.tool_calls import CallForm, CallPart, ToolCalls, form_of, takes_tools


async def answer(
    served: Served, asked: ChatCompletionRequest, model: str, metrics: EngineMetrics, routed: Routed
) -> Answer:
    """Raises ApiError."""
    form = _call_form(asked, served.tokenizer.chat_template)
    if form is CallForm.TAGGED:
        asked = asked.model_copy(update={"skip_special_tokens": False})  # the tags may be special tokens
    params = await served.params_of(asked)
    prompt = await served.prompts.of_chat(asked, asked)
    if asked.return_prompt_text:
        (text,) = await served.prompts.texts_of([prompt])
        prompt = Prompt(prompt.token_ids, text)
    ids = [prompt.token_ids]
    choices = choices_of(asked, params, ids, served.engine, served.tokenizer, metrics, routed)
    chat = _Chat(served, asked, responses.Head(*served.identity("chatcmpl", asked), model), prompt, choices, form)
    return Answer(chat.chunks, chat.body)


def _call_form(asked: ChatCompletionRequest, chat_template: str | None) -> CallForm | None:
    """How calls are read from the output; None: it is all text. Raises ApiError."""
    if not asked.may_call:
        return None
    if not takes_tools(chat_template):
        raise bad_parameter("This model's chat template has no tools.", "tools")
    if isinstance(asked.tool_choice, NamedTool):
        return CallForm.NAMED
    if asked.tool_choice == "required":
        return CallForm.LIST
    form = form_of(chat_template)
    if form is None:
        message = 'This model calls tools in a form that is not known here; use tool_choice "required" or a named tool.'
        raise bad_parameter(message, "tool_choice")
    return form


class _Chat:
    def __init__(
        self,
        served: Served,
        asked: ChatCompletionRequest,
        head: responses.Head,
        prompt: Prompt,
        choices: Sequence[Choice],
        form: CallForm | None,
    ) -> None:
        self._served = served
        self._asked = asked
        self._head = head
        self._prompt = prompt
        self._choices = choices
        self._form = form
        self._tally = Tally(choices)
        last = asked.messages[-1]
        self._echo = last.text if asked.echo and last.role == asked.role else ""

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        asked, tally = self._asked, self._tally
        tokens = [self._tokens() for _ in self._choices]
        calls = [self._calls() for _ in self._choices]
        begun = False
        async with aclosing(merged([choice.start() for choice in self._choices])) as made:
            async for index, piece in made:
                tally.add(index, piece)
                if not begun:
                    begun = True
                    for chunk in self._first_chunks():
                        yield self._event(chunk, 0)
                said, parts = _read(calls[index], piece)
                logprobs = None
                if asked.logprobs and piece.logprobs is not None:
                    logprobs = responses.chat_logprobs(tokens[index], [piece.logprobs], asked.top_logprobs or 0)
                chunk = responses.chat_chunk(
                    self._head,
                    index,
                    self._delta(said, parts),
                    piece,
                    self._finish(piece, calls[index]),
                    logprobs,
                    ([] if piece.token_id is None else [piece.token_id]) if asked.return_token_ids else None,
                )
                if piece.finish_reason is not None:
                    chunk["system_fingerprint"] = responses.FINGERPRINT
                yield self._event(chunk, tally.completion_tokens[index])
        if asked.include_usage:
            counts = tally.prompt_tokens, sum(tally.completion_tokens), tally.cached_tokens
            yield responses.event(self._head.usage_chunk(responses.CHAT_CHUNK, *counts))
        yield responses.DONE

    async def body(self) -> Json:
        asked, tally = self._asked, self._tally
        found = best(await collected(self._choices, tally), asked.tries, asked.choices)
        choices = [self._choice_of(index, got) for index, got in enumerate(found)]
        about = responses.full_usage(tally.prompt_tokens, sum(tally.completion_tokens), tally.cached_tokens)
        ids, first = self._prompt.token_ids, found[0].prompt_logprobs
        return {
            **self._head.body(responses.CHAT, choices, about),
            "prompt_logprobs": responses.prompt_logprobs(self._served.tokenizer, ids, first),
            "prompt_token_ids": ids if asked.return_token_ids else None,
            "prompt_text": self._prompt.text if asked.return_prompt_text else None,
        }

    def _choice_of(self, index: int, got: Collected) -> Json:
        asked, calls = self._asked, self._calls()
        last = got.last
        said, parts = _read(calls, Piece(last.token_id, got.text, None, last.finish_reason, last.stop_reason))
        made = self._whole_calls(parts)
        content: str | None = self._echo + said
        if made and not content and not asked.must_call:
            content = None
        logprobs = None
        if asked.logprobs:
            logprobs = responses.chat_logprobs(self._tokens(), got.logprobs, asked.top_logprobs or 0)
        return responses.chat_choice(
            index,
            asked.role,
            content,
            made,
            last,
            self._finish(last, calls),
            logprobs,
            got.token_ids if asked.return_token_ids else None,
        )

    def _event(self, chunk: Json, completion_tokens: int) -> bytes:
        if self._asked.continuous_usage:
            chunk["usage"] = responses.usage(len(self._prompt.token_ids), completion_tokens)
        return responses.event(chunk)

    def _first_chunks(self) -> list[Json]:
        """Of every choice, before the first token of any."""
        ids = self._prompt.token_ids if self._asked.return_token_ids else None
        text = self._prompt.text if self._asked.return_prompt_text else None
        made = [responses.role_chunk(self._head, each.index, self._asked.role, ids, text) for each in self._choices]
        if self._echo:
            made += [responses.said_chunk(self._head, each.index, self._echo) for each in self._choices]
        return made

    def _tokens(self) -> Tokens:
        return Tokens(self._served.tokenizer, bool(self._asked.return_tokens_as_token_ids))

    def _calls(self) -> ToolCalls | None:
        if self._form is None:
            return None
        choice = self._asked.tool_choice
        return ToolCalls(self._form, choice.function.name if isinstance(choice, NamedTool) else "")

    def _finish(self, piece: Piece, calls: ToolCalls | None) -> str | None:
        """A call that the client did not name is a reason of its own to stop."""
        called = calls is not None and calls.count and self._form is not CallForm.NAMED
        return "tool_calls" if called and piece.finish_reason == FinishReason.STOP.value else piece.finish_reason

    def _delta(self, said: str, parts: Sequence[CallPart]) -> Json:
        if self._form is None:
            return {"content": said}
        calls = [self._part(part) for part in parts if not (self._asked.one_call and part.index)]
        return ({"content": said} if said else {}) | ({"tool_calls": calls} if calls else {})

    def _part(self, part: CallPart) -> Json:
        if part.name is None:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        return {"id": _call_id(), "type": "function", "index": part.index, "function": function}

    def _whole_calls(self, parts: Sequence[CallPart]) -> list[Json]:
        made: list[Json] = []
        for part in parts:
            if part.name is not None:
                function = {"name": part.name, "arguments": ""}
                made.append({"id": _call_id(), "type": "function", "function": function})
            made[-1]["function"]["arguments"] += part.arguments
        return made[:1] if self._asked.one_call else made


def _call_id() -> str:
    return f"chatcmpl-tool-{secrets.token_hex(8)}"


def _read(calls: ToolCalls | None, piece: Piece) -> tuple[str, list[CallPart]]:
    """What is said in it, and the parts of calls; with the last piece also what was held back."""
    if calls is None:
        return piece.text, []
    parts = calls.push(piece.text)
    if piece.finish_reason is not None:
        parts += calls.flush()
    return "".join(p for p in parts if isinstance(p, str)), [p for p in parts if isinstance(p, CallPart)]
