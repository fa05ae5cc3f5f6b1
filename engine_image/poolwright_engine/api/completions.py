"""What a completions request becomes: its choices, and their answer as chunks or as one body.

Knows no HTTP; what cannot be done is an ApiError before anything starts.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from poolwright_engine.api import responses
from poolwright_engine.api.answer import Answer, Served
from poolwright_engine.api.fan_out import Choice, Collected, Tally, best, choices_of, collected, merged
from poolwright_engine.api.generation import Piece
from poolwright_engine.api.metrics import EngineMetrics
from poolwright_engine.api.openai_api import CompletionRequest
from poolwright_engine.api.responses import CompletionLogprobs, Json, Tokens
from poolwright_engine.api.routed import Routed


async def answer(
    served: Served, asked: CompletionRequest, model: str, metrics: EngineMetrics, routed: Routed
) -> Answer:
    """Raises ApiError."""
    params = await served.params_of(asked)
    prompts = await served.prompts.of_completion(asked)
    ids = [prompt.token_ids for prompt in prompts]
    echoes = await served.prompts.texts_of(prompts) if asked.echo else []
    choices = choices_of(asked, params, ids, served.engine, served.tokenizer, metrics, routed)
    completion = _Completion(served, asked, responses.Head(*served.identity("cmpl", asked), model), echoes, choices)
    return Answer(completion.chunks, completion.body)


class _Completion:
    def __init__(
        self,
        served: Served,
        asked: CompletionRequest,
        head: responses.Head,
        echoes: Sequence[str],
        choices: Sequence[Choice],
    ) -> None:
        self._served = served
        self._asked = asked
        self._head = head
        self._echoes = echoes
        self._choices = choices
        self._tally = Tally(choices)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        asked, tally = self._asked, self._tally
        logprobs = [self._logprobs() for _ in self._choices]
        begun = [False] * len(self._choices)
        async with aclosing(merged([choice.start() for choice in self._choices])) as made:
            async for index, piece in made:
                tally.add(index, piece)
                first, begun[index] = not begun[index], True
                choice = self._choices[index]
                shown = self._with_echo(choice, piece) if first else piece
                chunk = responses.completion_chunk(
                    self._head,
                    index,
                    shown,
                    self._logprobs_of(logprobs[index], choice, piece, [piece] if piece.logprobs else []),
                    choice.prompt_ids if first and asked.return_token_ids else None,
                    _ids(piece) if asked.return_token_ids else None,
                )
                if piece.finish_reason is not None:
                    chunk["system_fingerprint"] = responses.FINGERPRINT
                if asked.continuous_usage:
                    chunk["usage"] = responses.usage(len(choice.prompt_ids), tally.completion_tokens[index])
                yield responses.event(chunk)
        if asked.include_usage:
            counts = tally.prompt_tokens, sum(tally.completion_tokens), tally.cached_tokens
            yield responses.event(self._head.usage_chunk(responses.COMPLETION, *counts))
        yield responses.DONE

    async def body(self) -> Json:
        asked, tally = self._asked, self._tally
        found = best(await collected(self._choices, tally), asked.tries, asked.choices)
        choices = [self._choice_of(index, got) for index, got in enumerate(found)]
        about = responses.full_usage(tally.prompt_tokens, sum(tally.completion_tokens), tally.cached_tokens)
        return self._head.body(responses.COMPLETION, choices, about)

    def _choice_of(self, index: int, got: Collected) -> Json:
        asked, prompt_ids = self._asked, got.choice.prompt_ids
        whole = Piece(None, got.text, prompt_logprobs=got.prompt_logprobs)
        pieces = [Piece(each.token_id, "", each) for each in got.logprobs]
        return responses.completion_choice(
            index,
            self._with_echo(got.choice, whole).text,
            got.last,
            self._logprobs_of(self._logprobs(), got.choice, whole, pieces),
            responses.prompt_logprobs(self._served.tokenizer, prompt_ids, got.prompt_logprobs),
            prompt_ids if asked.return_token_ids else None,
            got.token_ids if asked.return_token_ids else None,
        )

    def _with_echo(self, choice: Choice, piece: Piece) -> Piece:
        if not self._asked.echo:
            return piece
        text = self._echoes[choice.prompt]
        return replace(piece, text=text if self._asked.only_echo else text + piece.text)

    def _logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(Tokens(self._served.tokenizer, bool(self._asked.return_tokens_as_token_ids)))

    def _logprobs_of(
        self, logprobs: CompletionLogprobs, choice: Choice, about: Piece, pieces: Sequence[Piece]
    ) -> Json | None:
        """`about` carries the prompt's, which come first in an echo."""
        if self._asked.logprobs is None:
            return None
        parts = []
        if self._asked.echo and about.prompt_logprobs is not None:
            parts.append(logprobs.of_prompt(choice.prompt_ids, about.prompt_logprobs))
        if not self._asked.only_echo:
            parts.append(logprobs.of([piece.logprobs for piece in pieces if piece.logprobs is not None]))
        parts = [part for part in parts if part["tokens"]]
        return responses.joined(parts) if parts else None


def _ids(piece: Piece) -> list[int]:
    return [] if piece.token_id is None else [piece.token_id]
